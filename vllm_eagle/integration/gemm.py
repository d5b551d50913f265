"""vLLM's packed matrix product on CPU, for the head's layers: about twice a plain one at a few rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F
from vllm import _custom_ops as ops

from vllm_eagle.heads import EagleHead

_MOST_ROWS = 32
"""What vLLM itself passes when it packs a layer."""


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return x [n, in] -> x W^T + b [n, out] for weight [out, in]; the weight is copied into the packed form."""
    if not ops._supports_onednn:
        return lambda x: F.linear(x, weight, bias)
    handler = ops.create_onednn_mm(weight.contiguous().t(), _MOST_ROWS)
    return lambda x: ops.onednn_mm(handler, x, bias)


def use_packed_linears(head: EagleHead) -> None:
    """Replace every linear layer of a loaded head by its packed form."""
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))


class PackedLinear(nn.Module):
    """Stand in for a linear layer of a head that only serves."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._apply_packed = packed_linear(linear.weight.detach(), bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_packed(x)

"""vLLM's packed matrix products on CPU, for the head: at a few rows a product costs what reading its weights costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm import _custom_ops as ops

from vllm_eagle.heads import AnyHead
from vllm_eagle.heads.layers import MLP

_MOST_ROWS = 32
"""What vLLM itself passes when it packs a layer."""


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return x [n, in] -> x W^T + b [n, out] for weight [out, in]; the weight is copied into the packed form."""
    try:
        if ops._supports_onednn and weight.device.type == "cpu":
            handler = ops.create_onednn_mm(weight.contiguous().t(), _MOST_ROWS)
            return lambda x: ops.onednn_mm(handler, x, bias)
    except RuntimeError:  # no such product of float16 on CPUs without AVX512-FP16; vLLM's layers fall back in the same way
        pass
    return lambda x: F.linear(x, weight, bias)


def eight_bit_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return x [n, in] -> about x W^T [n, out], both factors rounded to 8 bits a row: a quarter of float32's bytes to read.

    For what only ranks guesses. Full precision where the machine has no 8-bit dot product or vLLM no such product of the dtype.
    """
    known = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    if not (known and ops._supports_onednn and torch.cpu._is_vnni_supported()):
        return packed_linear(weight)
    scales = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    rounded = (weight / scales).round().to(torch.int8)
    scales = scales.squeeze(1)  # the product refers to them, so `apply` keeps them
    handler = ops.create_onednn_scaled_mm(rounded.t(), scales, weight.dtype, True, False, _MOST_ROWS)

    def apply(x: Tensor) -> Tensor:
        x8, x_scales, _ = ops.onednn_scaled_int8_quant(x.contiguous())
        out = torch.empty(len(x), len(scales), dtype=weight.dtype)
        return ops.onednn_scaled_mm(handler, x8, out, x_scales, None, None, None)

    return apply


def use_packed_linears(head: AnyHead) -> None:
    """Replace every linear layer of a loaded head by its packed form.

    Feed-forward layers, two thirds of a head, read normed inputs and lose nothing in 8 bits. The fusion layer does:
    features are ten times as large as the embeddings beside them.
    """
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child, eight_bits=isinstance(module, MLP)))


class PackedLinear(nn.Module):
    """Stand in for a linear layer of a head that only serves."""

    def __init__(self, linear: nn.Linear, eight_bits: bool) -> None:
        super().__init__()
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        self._apply_packed = eight_bit_linear(weight) if eight_bits else packed_linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_packed(x)

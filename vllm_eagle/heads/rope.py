"""Rotary position embedding of a head.

Shapes: `...` any leading dimensions, `H` heads, `K` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_eagle.errors import HeadError


class Rotary(nn.Module):
    """Rotate queries and keys by position; no table, so no position is ever out of range.

    Angles are computed in float32. Scaled variants (`llama3`, `linear`, `yarn`, ...) come from transformers.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, max_positions: int, rope: Mapping[str, Any]) -> None:
        super().__init__()
        kind = rope["rope_type"]
        if kind == "default":
            steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            inv_freq, self.scale = 1.0 / float(rope["rope_theta"]) ** steps, 1.0
        elif kind in ROPE_INIT_FUNCTIONS:
            config = LlamaConfig(
                head_dim=head_dim,
                hidden_size=head_dim,
                num_attention_heads=1,
                max_position_embeddings=max_positions,
                rope_parameters=dict(rope),
            )
            with torch.device("cpu"):  # real numbers even where a head is built for its shapes alone
                inv_freq, self.scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        else:
            raise HeadError(
                f"rope_type={kind!r} of the head is unknown; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
            )
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Follow the module to another device, never to another dtype: bfloat16 has no digits for a position times this."""
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., 1, K/2] in float32 for integer positions [...]."""
        theta = positions.to(torch.float32).unsqueeze(-1) * self.inv_freq
        return (theta.cos() * self.scale).unsqueeze(-2), (theta.sin() * self.scale).unsqueeze(-2)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [..., H, K]; the two halves of K are the pair (Llama convention)."""
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

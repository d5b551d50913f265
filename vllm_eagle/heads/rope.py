"""Rotary position embedding of a head.

Shapes: `...` any leading dimensions, `H` heads, `K` head size, `P` pairs that rotate, at most K/2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_eagle.errors import HeadError

_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")
"""Kinds of scaling whose frequencies do not hang on a text's length, up to the head's positions: `longrope` has two sets."""
_SETTINGS = {
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


def read_rope(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read rotary settings in both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`; raises `HeadError`."""
    merged: dict[str, Any] = {"rope_type": "default", "rope_theta": float(raw.get("rope_theta") or 10000.0)}
    if (share := raw.get("partial_rotary_factor")) not in (None, 1):
        merged["partial_rotary_factor"] = share
    merged.update(raw.get("rope_scaling") or {})
    merged.update(raw.get("rope_parameters") or {})
    merged["rope_type"] = merged.pop("type", merged["rope_type"])
    if merged["rope_type"] not in _KINDS:
        raise HeadError(f"{where}: rope_type={merged['rope_type']!r} of the head is not supported; known: {', '.join(_KINDS)}")
    if unknown := sorted(set(merged) - _SETTINGS):
        raise HeadError(f"{where}: rotary setting {unknown[0]}={merged[unknown[0]]!r} of the head is not supported")
    return merged


class Rotary(nn.Module):
    """Rotate queries and keys by position; no table, so no position is ever out of range.

    Angles are computed in float32. Scaled variants (`llama3`, `linear`, `yarn`, ...) come from transformers. Up to the
    head's positions, beyond which nothing is drafted, `dynamic` is no scaling.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, max_positions: int, rope: Mapping[str, Any]) -> None:
        super().__init__()
        kind = rope["rope_type"]
        if kind == "default":
            turning = int(head_dim * rope.get("partial_rotary_factor", 1.0))
            steps = torch.arange(0, turning, 2, dtype=torch.float32) / turning
            inv_freq, self.scale = 1.0 / float(rope["rope_theta"]) ** steps, 1.0
        else:
            inv_freq, self.scale = _scaled(head_dim, max_positions, rope)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Follow the module to another device, never to another dtype: bfloat16 has no digits for a position times this."""
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., 1, P] in float32 for integer positions [...]."""
        theta = positions.to(torch.float32).unsqueeze(-1) * self.inv_freq
        return (theta.cos() * self.scale).unsqueeze(-2), (theta.sin() * self.scale).unsqueeze(-2)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [..., H, K]; the two halves of its first 2P are the pairs (Llama convention), the rest stays."""
        turning = 2 * cos.shape[-1]
        a, b = x[..., :turning].float().chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
        return rotated if turning == x.shape[-1] else torch.cat((rotated, x[..., turning:]), dim=-1)


def _scaled(head_dim: int, max_positions: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Return the frequencies [P] of a scaled kind, and what cos and sin are multiplied by; raises `HeadError`."""
    try:
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=max_positions,
            rope_parameters=dict(rope),
        )
        with torch.device("cpu"):  # real numbers even where a head is built for its shapes alone
            return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    except KeyError as missing:
        raise HeadError(f"rotary settings of the head are not complete ({missing.args[0]})") from None

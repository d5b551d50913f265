"""The parts of a Llama layer that every head is made of, with the attending left to the caller.

Shapes: `...` leading dimensions (tokens, or batch and tokens), `H` heads, `G` K/V heads, `K` head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.rope import Rotary


class Attend(Protocol):
    """Attend from rotated queries to whatever keys the caller keeps."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Take query [..., H, K], key and value [..., G, K] of this pass; return [..., H, K]."""
        ...


class RMSNorm(nn.Module):
    """Scale to unit root mean square in float32, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Project inputs of `width`, rotate, and leave the attending to the caller."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        size, bias = config.head_dim, config.qkv_bias
        self.size = size
        self.q_proj = nn.Linear(width, config.num_heads * size, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, layer: int, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        split = (*x.shape[:-1], -1, self.size)
        query = Rotary.rotate(self.q_proj(x).view(split), *angles)
        key = Rotary.rotate(self.k_proj(x).view(split), *angles)
        out = attend(layer, query, key, self.v_proj(x).view(split))
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Apply Llama's gated feed-forward layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

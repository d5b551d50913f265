"""The parts of a Llama layer that every head is made of, with the attending left to the caller.

Shapes: `...` leading dimensions (tokens, or batch and tokens), `D` hidden, `H` heads, `G` K/V heads, `K` head size, `V` words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.rope import Rotary


class Attend(Protocol):
    """Attend from rotated queries to whatever keys the caller keeps."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Take query [..., H, K], key and value [..., G, K] of this pass; return [..., H, K].

        Queries are fewer where only some rows of the last layer are wanted.
        """
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


def chosen(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Return the rows of x [T, ...] that are wanted; all for None."""
    return x if wanted is None else x[wanted]


class Attention(nn.Module):
    """Project inputs of `width`, rotate, and leave the attending to the caller."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        size, bias = config.head_dim, config.qkv_bias
        self.size = size
        self.q_proj = nn.Linear(width, config.num_heads * size, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * size, config.hidden_size, bias=config.o_bias)

    def forward(
        self, x: Tensor, layer: int, angles: tuple[Tensor, Tensor], attend: Attend, wanted: Tensor | None = None
    ) -> Tensor:
        asking, (cos, sin) = chosen(x, wanted), (chosen(angle, wanted) for angle in angles)
        query = Rotary.rotate(self.q_proj(asking).view(*asking.shape[:-1], -1, self.size), cos, sin)
        split = (*x.shape[:-1], -1, self.size)
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


class DecoderLayer(nn.Module):
    """Apply one Llama layer, with or without a norm before its attention."""

    def __init__(self, config: HeadConfig, index: int, normed: bool = True) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if normed else None
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, wanted: Tensor | None = None) -> Tensor:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = chosen(x, wanted) + self.self_attn(normed, self.index, angles, attend, wanted)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class BaseHead(nn.Module):
    """Hold what every kind of head has: an embedding of its own, or the target's."""

    config: HeadConfig
    embed_tokens: nn.Embedding | None

    def _own_embedding(self, config: HeadConfig) -> nn.Embedding | None:
        return nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None

    def embedding(self, shared: Tensor) -> Tensor:
        """Return the rows [V, D] that tokens are embedded with; `shared`, the target's, for a head without its own."""
        return shared if self.embed_tokens is None else self.embed_tokens.weight

    @torch.no_grad()
    def share_embedding(self, embed: Callable[[Tensor], Tensor], rows: int = 4096) -> Callable[[Tensor], Tensor]:
        """Return what maps tokens [n] to [n, D]: `embed`, the target's, unless the head's own rows differ from it.

        Rows that do not differ are let go: a copy is most of a released head's folder.
        """
        if self.embed_tokens is None:
            return embed
        own = self.embed_tokens.weight
        parts = torch.split(torch.arange(len(own), device=own.device), rows)
        if not all(torch.equal(embed(part).to(own.dtype), own[part]) for part in parts):
            return self.embed_tokens
        self.embed_tokens, self.config = None, replace(self.config, own_embedding=False)
        return embed

"""The EAGLE-1/2 head: a fusion layer and Llama decoder layers over the target's features.

One module serves training, the reference loop and serving; they differ only in the `attend` they pass in.

    position        0    1    2   ...   i
    feature         f0   f1   f2  ...   fi      target hidden state after its final norm
    token one ahead t1   t2   t3  ...   ti+1    known already: it was sampled from fi
    output          f^1  f^2  f^3 ...   f^i+1   LM head reads it: guess for ti+2

Shapes: `...` leading dimensions (tokens, or batch and tokens), `D` hidden, `H` heads, `G` K/V heads, `K` head size.
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
    """Project, rotate, and leave the attending to the caller."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.size = size
        self.q_proj = nn.Linear(hidden, config.num_heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * size, hidden, bias=False)

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


class DecoderLayer(nn.Module):
    """Apply one Llama layer; the first layer of a head has no input norm (EAGLE-1's released code)."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        self.index = index
        if index > 0:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.input_layernorm(x) if self.index > 0 else x
        x = x + self.self_attn(normed, self.index, angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class EagleHead(nn.Module):
    """Predict the target's next feature from its features and the tokens one step ahead (EAGLE-1, section 4.1).

    Embedding and LM head are the target's and stay with their owner; no final norm follows the last layer.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fusion_bias)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.rotary = Rotary(config.head_dim, config.max_positions, config.rope)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return predicted features [..., D].

        `embeddings` [..., D] of the tokens one step ahead, `features` [..., D], `positions` [...] of the features.
        """
        x = self.fc(torch.cat((embeddings, features), dim=-1))
        angles = self.rotary.angles(positions)
        for layer in self.layers:
            x = layer(x, angles, attend)
        return x  # type: ignore[no-any-return]

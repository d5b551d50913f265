"""The EAGLE-1/2 head: a fusion layer and Llama decoder layers over the target's features.

One module serves training, the reference loop and serving; they differ only in the `attend` they pass in.

    position        0    1    2   ...   i
    feature         f0   f1   f2  ...   fi      target hidden state after its final norm
    token one ahead t1   t2   t3  ...   ti+1    known already: it was sampled from fi
    output          f^1  f^2  f^3 ...   f^i+1   LM head reads it: guess for ti+2

Shapes: `...` leading dimensions (tokens, or batch and tokens), `D` hidden, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.layers import MLP, Attend, Attention, RMSNorm
from vllm_eagle.heads.rope import Rotary


class DecoderLayer(nn.Module):
    """Apply one Llama layer; the first layer of a head has no input norm (EAGLE-1's released code)."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        self.index = index
        if index > 0:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
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

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features [..., D] of true positions: the target's states as they are."""
        return states

    def readout(self, features: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the draft's logits: the features themselves and the target's LM head [V, D]."""
        return features, lm_head

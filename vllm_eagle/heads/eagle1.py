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
from vllm_eagle.heads.layers import Attend, BaseHead, DecoderLayer, RMSNorm
from vllm_eagle.heads.rope import Rotary


class EagleHead(BaseHead):
    """Predict the target's next feature from its features and the tokens one step ahead (EAGLE-1, section 4.1).

    The LM head is the target's and stays with its owner, as does the embedding unless the folder holds another. Released
    heads have no norm but the layers' own; `layernorms` (HASS) adds one to the embedding, to the first layer and before
    the LM head, outside of what the next step reads.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

        def norm() -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config.rms_norm_eps) if config.layernorms else None

        self.embed_tokens = self._own_embedding(config)
        self.embedding_layernorm, self.pre_lm_head_layernorm = norm(), norm()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fusion_bias)
        self.layers = nn.ModuleList(DecoderLayer(config, i, i > 0 or config.layernorms) for i in range(config.num_layers))
        self.rotary = Rotary(config.head_dim, config.max_positions, config.rope)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None
    ) -> Tensor:
        """Return predicted features [..., D].

        `embeddings` [..., D] of the tokens one step ahead, `features` [..., D], `positions` [...] of the features; `wanted`
        [W], for inputs [T, D]: the rows to return, of the others the last layer makes keys and values alone.
        """
        if self.embedding_layernorm is not None:
            embeddings = self.embedding_layernorm(embeddings)
        x = self.fc(torch.cat((embeddings, features), dim=-1))
        angles = self.rotary.angles(positions)
        *inner, last = self.layers
        for layer in inner:
            x = layer(x, angles, attend)
        x = last(x, angles, attend, wanted)
        return x  # type: ignore[no-any-return]

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features [..., D] of true positions: the target's states as they are."""
        return states

    def normed(self, features: Tensor) -> Tensor:
        """Return what the LM head reads [..., D]."""
        return features if self.pre_lm_head_layernorm is None else self.pre_lm_head_layernorm(features)

    def readout(self, features: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the draft's logits: what the LM head reads, and the target's LM head [V, D]."""
        return self.normed(features), lm_head

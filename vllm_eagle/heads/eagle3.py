"""The EAGLE-3 head: a decoder layer over states of three of the target's layers, with an LM head of its own.

    position        0    1    2   ...   i
    states          s0   s1   s2  ...   si      inputs of a low, a middle and a high layer of the target, side by side
    fused           g0   g1   g2  ...   gi      fc(s); from the second draft step on, the layer's own last output
    token one ahead t1   t2   t3  ...   ti+1    known already
    output          a0   a1   a2  ...   ai      before `norm`: the next step's g; after it, what the LM head reads

Variants (EAGLE-3.1, `speculators`), each a flag: `norm_before_fc` norms s as a whole, `fc_norm` each of its states;
`norm_before_residual` makes the normed g the residual; `norm_output` makes the normed a the next step's g.

Shapes: `...` leading dimensions (tokens, or batch and tokens), `D` hidden, `E` hidden of the
target, `A` states read, `V` vocabulary, `S` draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_eagle.errors import HeadError
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.layers import MLP, Attend, Attention, BaseHead, DecoderLayer, RMSNorm, chosen
from vllm_eagle.heads.rope import Rotary


class FusedLayer(nn.Module):
    """Apply a Llama layer whose attention reads embedding and feature side by side, each normed by itself."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Return [..., D]; the residual is the feature as it came, unless it is to be normed before."""
        normed = self.hidden_norm(features)
        both = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        residual = normed if self.norm_before_residual else features
        x = chosen(residual, wanted) + self.self_attn(both, 0, angles, attend, wanted)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Eagle3Head(BaseHead):
    """Predict the target's next token from some of its layers and the token one step ahead (EAGLE-3, section 3).

    The embedding is the target's and stays with its owner unless the folder holds another. `d2t` [S] is an offset: row i of
    the LM head is token i + d2t[i] of the target; `t2d` [V] tells which tokens have a row.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.draft_vocab_size is not None, "not the configuration of an EAGLE-3 head"
        self.config = config
        hidden, eps, wide = config.hidden_size, config.rms_norm_eps, config.target_size
        self.embed_tokens = self._own_embedding(config)
        self.input_norm = RMSNorm(config.num_aux * wide, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(wide, eps) for _ in range(config.num_aux)) if config.fc_norm else None
        self.fc = nn.Linear(config.num_aux * wide, hidden, bias=config.fusion_bias)
        self.midlayer = FusedLayer(config)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i) for i in range(1, config.num_layers)})
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.rotary = Rotary(config.head_dim, config.max_positions, config.rope)

    @property
    def vocabulary(self) -> Tensor:
        """Return the target's token of each row of the LM head [S]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, tokens: Tensor) -> None:
        """Let row i of the LM head stand for `tokens[i]` of the target; [S], all different."""
        self.d2t.copy_(tokens - torch.arange(len(self.d2t), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True
        self.check_vocabulary()

    def check_vocabulary(self) -> None:
        """Raise `HeadError` unless `d2t` and `t2d` name the same tokens of the target, each once."""
        if not torch.equal(self.vocabulary.sort().values, self.t2d.nonzero().squeeze(1)):
            raise HeadError("d2t and t2d do not name the same tokens; d2t must hold offsets (token = row + d2t[row])")

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the features of the next step [..., D].

        `embeddings` [..., D] of the tokens one step ahead, `features` [..., D], `positions` [...] of the features; `wanted`
        [W], for inputs [T, D]: the rows to return, of the others the last layer makes keys and values alone.
        """
        angles = self.rotary.angles(positions)
        later = list(self.layers.values())
        x = self.midlayer(embeddings, features, angles, attend, None if later else wanted)
        for layer in later:
            x = layer(x, angles, attend, wanted if layer is later[-1] else None)
        return self.norm(x) if self.config.norm_output else x  # type: ignore[no-any-return]

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features [..., D] of true positions from the target's states [..., A*E], in the order of the layers."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)  # type: ignore[no-any-return]

    def normed(self, features: Tensor) -> Tensor:
        """Return what the LM head reads [..., D]."""
        return features if self.config.norm_output else self.norm(features)

    def readout(self, features: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the draft's logits: normed features and the head's own rows [S, D].

        `lm_head`, the target's, is not used: it is there for heads that borrow it.
        """
        return self.normed(features), self.lm_head.weight

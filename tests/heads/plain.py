"""Heads computed from the tensors of their files, formula by formula: a second opinion that shares no code with the package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from vllm_eagle.heads import Attend


class PlainHead:
    """Compute what a folder of any layout says, by the names its files use. Shapes as in `Head`."""

    def __init__(self, folder: Path) -> None:
        self.raw = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.layer = self.raw.get("transformer_layer_config", self.raw)
        self.eagle3 = "norm.weight" in self.tensors
        self.first = next(
            name for name in ("midlayer", "transformer", "layers.0") if f"{name}.mlp.up_proj.weight" in self.tensors
        )
        rotary = {key: self.layer[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if key in self.layer}
        sizes = {key: self.layer[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")}
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes, **rotary))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Norm by a weight of that name."""
        return F.rms_norm(x, (x.shape[-1],), self.tensors[f"{name}.weight"], self.layer["rms_norm_eps"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a weight of that name and add its bias, if the file has one."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def fuse(self, states: Tensor) -> Tensor:
        """See `Head`."""
        if not self.eagle3:
            return states
        if self.raw.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        if self.raw.get("fc_norm"):
            names = ["fc_norm.0", "fc_norm.1", "fc_norm.2"] if "fc_norm.0.weight" in self.tensors else LEGACY
            states = torch.cat([self.norm(part, name) for part, name in zip(states.chunk(3, -1), names, strict=True)], -1)
        return self.linear(states, "fc")

    def __call__(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Head`."""
        count = self.layer["num_hidden_layers"]
        if not self.eagle3:
            if self.raw.get("layernorms"):
                embeddings = self.norm(embeddings, "embedding_layernorm")
            x = self.linear(torch.cat((embeddings, features), -1), "fusion_fc" if "fusion_fc.weight" in self.tensors else "fc")
            normed = self.norm(x, f"{self.first}.input_layernorm") if self.raw.get("layernorms") else x
            x = self.block(self.first, 0, x, normed, positions, attend)
        else:
            normed = self.norm(features, f"{self.first}.hidden_norm")
            both = torch.cat((self.norm(embeddings, f"{self.first}.input_layernorm"), normed), -1)
            residual = normed if self.raw.get("norm_before_residual") else features
            x = self.block(self.first, 0, residual, both, positions, attend)
        for i in range(1, count):
            x = self.block(f"layers.{i}", i, x, self.norm(x, f"layers.{i}.input_layernorm"), positions, attend)
        return self.norm(x, "norm") if self.raw.get("norm_output") else x

    def block(self, name: str, index: int, residual: Tensor, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Attend from `x`, add `residual`, and feed forward."""

        def heads(part: str) -> Tensor:
            return self.linear(x, f"{name}.self_attn.{part}_proj").view(1, len(x), -1, self.layer["head_dim"])

        query, key = apply_rotary_pos_emb(heads("q"), heads("k"), *self.rotary(x, positions[None]), unsqueeze_dim=2)
        mixed = attend(index, query[0], key[0], heads("v")[0]).flatten(1)
        x = residual + self.linear(mixed, f"{name}.self_attn.o_proj")
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = self.linear(normed, f"{name}.mlp.gate_proj"), self.linear(normed, f"{name}.mlp.up_proj")
        return x + self.linear(F.silu(gate) * up, f"{name}.mlp.down_proj")

    def embedding(self, shared: Tensor) -> Tensor:
        """See `Head`."""
        return self.tensors.get("embed_tokens.weight", shared)

    def readout(self, features: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head`."""
        if self.raw.get("layernorms"):
            return self.norm(features, "pre_lm_head_layernorm"), lm_head
        if not self.eagle3:
            return features, lm_head
        return (features if self.raw.get("norm_output") else self.norm(features, "norm")), self.tensors["lm_head.weight"]

    def logits(self, features: Tensor, lm_head: Tensor) -> Tensor:
        """Return logits [n, V] of the target's tokens for features [n, D]; -inf where the draft vocabulary has no row."""
        hidden, rows = self.readout(features, lm_head)
        if "d2t" not in self.tensors:
            return hidden @ rows.T
        found = torch.full((len(features), len(self.tensors["t2d"])), -torch.inf)
        found[:, torch.arange(len(rows)) + self.tensors["d2t"]] = hidden @ rows.T
        return found


LEGACY: Sequence[str] = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")

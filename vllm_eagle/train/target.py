"""The target as training needs it: its features for given tokens, its embedding and its LM head.

Shapes: `B` sequences, `T` tokens of the longest, `N` rows, `D` hidden, `A` auxiliary layers, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_eagle.errors import EagleError
from vllm_eagle.heads import HeadConfig


@dataclass
class Target:
    """Hold a frozen Hugging Face causal language model."""

    model: Any
    config: Any

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
        """Load the model in `folder`; raises `EagleError` when it cannot be read."""
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (OSError, ValueError) as bad:
            raise EagleError(f"{folder}: the target cannot be loaded ({str(bad).splitlines()[0]})") from None
        if getattr(model.config, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")  # the default ignores the cap in silence
        model.requires_grad_(False).eval()
        return cls(model.to(device), model.config)

    @property
    def embedding(self) -> Tensor:
        """Return the input embedding [V, D]."""
        return self.model.get_input_embeddings().weight  # type: ignore[no-any-return]

    @property
    def lm_head(self) -> Tensor:
        """Return the output projection [V, D]."""
        return self.model.get_output_embeddings().weight  # type: ignore[no-any-return]

    def features(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return for each sequence its features [T, D]: what the LM head reads, after the final norm."""
        return [feature for feature, _ in self.states(sequences, ())]

    @torch.inference_mode()
    def states(self, sequences: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return for each sequence its features [T, D] and the inputs of `aux_layers`, side by side [T, A*D].

        Padded on the right: under a causal mask no real token sees the padding.
        """
        longest = max(map(len, sequences))
        tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
        for row, ids in zip(tokens, sequences, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        tokens = tokens.to(self.embedding.device)
        out = self.model.model(tokens, use_cache=False, output_hidden_states=bool(aux_layers))
        features = out.last_hidden_state  # [B, T, D]
        aux = torch.cat([features[..., :0], *(out.hidden_states[i] for i in aux_layers)], dim=-1)  # entry i enters layer i
        return [(features[i, : len(ids)], aux[i, : len(ids)]) for i, ids in enumerate(sequences)]

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """Return logits [N, V] for features [N, D], capped where the target caps them (Gemma-2)."""
        logits = F.linear(features.to(self.lm_head.dtype), self.lm_head)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * (logits / cap).tanh()


def count_layers(target: Path) -> int:
    """Return how many decoder layers the model in `target` has."""
    return int(AutoConfig.from_pretrained(target).num_hidden_layers)


_COPIED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
)
"""What a head of ours takes over from its target."""


def head_config(
    target: Path,
    num_layers: int,
    intermediate_size: int | None = None,
    draft_vocab_size: int | None = None,
    aux_layers: Sequence[int] = (),
) -> HeadConfig:
    """Describe a head that fits `target`: its sizes, `num_layers` decoder layers, no biases.

    With a `draft_vocab_size` it is an EAGLE-3 head that reads the inputs of the target's `aux_layers`.
    """
    theirs = AutoConfig.from_pretrained(target).to_dict()
    raw = {key: theirs[key] for key in _COPIED if key in theirs}
    wanted: dict[str, Any] = {"num_hidden_layers": num_layers, "bias": False, "qkv_bias": False}
    if draft_vocab_size is not None:
        wanted |= {"draft_vocab_size": draft_vocab_size, "eagle_aux_hidden_state_layer_ids": aux_layers}
    if intermediate_size is not None:
        wanted["intermediate_size"] = intermediate_size
    return HeadConfig.from_hf(raw | wanted, str(target))

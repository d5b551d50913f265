"""The target as training needs it: its features for given tokens, its embedding and its LM head.

Shapes: `B` sequences, `T` tokens of the longest, `N` rows, `D` hidden, `V` vocabulary.
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

    @torch.inference_mode()
    def features(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return for each sequence its features [T, D]: what the LM head reads, after the final norm.

        Padded on the right: under a causal mask no real token sees the padding.
        """
        longest = max(map(len, sequences))
        tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
        for row, ids in zip(tokens, sequences, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        hidden = self.model.model(tokens.to(self.embedding.device), use_cache=False).last_hidden_state  # [B, T, D]
        return [hidden[i, : len(ids)] for i, ids in enumerate(sequences)]

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """Return logits [N, V] for features [N, D]."""
        return F.linear(features.to(self.lm_head.dtype), self.lm_head)


def head_config(target: Path, num_layers: int, intermediate_size: int | None = None) -> HeadConfig:
    """Describe a head that fits `target`: its sizes, `num_layers` decoder layers, no biases."""
    raw = AutoConfig.from_pretrained(target).to_dict()
    wanted = {"num_hidden_layers": num_layers, "bias": False, "qkv_bias": False}
    if intermediate_size is not None:
        wanted["intermediate_size"] = intermediate_size
    return HeadConfig.from_hf(raw | wanted, str(target))

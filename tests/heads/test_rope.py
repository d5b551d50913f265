"""Rotary settings of a head, in both spellings, against transformers' own model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vllm_eagle.errors import HeadError
from vllm_eagle.heads import HeadConfig
from vllm_eagle.heads.rope import Rotary

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, its own numbers": {
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling, type"])
@pytest.mark.parametrize("kind", KINDS)
def test_41_angles_are_transformers_own(kind: str, spelling: str, theta: float) -> None:
    """Catches a scaling dropped, a base forgotten, an attention factor left out: drafts that fade with length (scenario 41)."""
    settings = {"rope_type": kind.split(",")[0]} | KINDS[kind]
    if spelling == "rope_parameters":
        raw = SIZES | {"rope_parameters": settings | {"rope_theta": theta}}
    else:
        name = "type" if spelling.endswith("type") else "rope_type"
        scaling = {name if key == "rope_type" else key: value for key, value in settings.items()}
        raw = SIZES | {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
    positions = torch.arange(4001)
    config = HeadConfig.from_hf(raw)
    found = Rotary(config.head_dim, config.max_positions, config.rope).angles(positions)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))(torch.zeros(1), positions[None])
    for angle, want in zip(found, theirs, strict=True):
        torch.testing.assert_close(torch.cat((angle, angle), -1).squeeze(1), want[0], rtol=0, atol=2e-6)
    if kind != "default":  # the setting does something
        plain = Rotary(32, 4096, {"rope_type": "default", "rope_theta": theta}).angles(positions)
        assert (found[0] - plain[0]).abs().max() > 0.1
    assert HeadConfig.from_hf(config.to_hf()).rope == config.rope


def test_41_an_unknown_kind_is_named() -> None:
    """Catches a kind of scaling read as no scaling (scenario 41)."""
    with pytest.raises(HeadError, match=r"rope_type='spiral' of the head is not supported; known: default, .*llama3"):
        HeadConfig.from_hf(SIZES | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0}})

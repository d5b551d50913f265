"""Rotary settings of a head, in both spellings, against transformers' own model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

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


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "beside"])
@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_41_a_part_of_the_head_turns(kind: str, spelling: str) -> None:
    """Catches partial_rotary_factor dropped in one spelling, or dimensions turned that should stay (scenario 41)."""
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0} | KINDS[kind]
    config = LlamaConfig(**SIZES, rope_parameters=settings | {"partial_rotary_factor": 0.5})
    part = {"partial_rotary_factor": 0.5}
    raw = SIZES | {"rope_scaling" if spelling == "rope_scaling" else "rope_parameters": settings | part}
    if spelling == "beside":
        raw = SIZES | part | {"rope_parameters": settings}
    ours = HeadConfig.from_hf(raw)
    rotary = Rotary(ours.head_dim, ours.max_positions, ours.rope)
    if kind == "default":
        wanted = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    else:
        wanted, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(rotary.inv_freq, wanted.float())
    x, angles = torch.randn(9, 3, 32), rotary.angles(torch.arange(9))
    turned = Rotary.rotate(x, *angles)
    assert torch.equal(turned[..., 16:], x[..., 16:])
    cos, sin = (torch.cat((angle, angle), -1).squeeze(1) for angle in angles)
    whole, _ = apply_rotary_pos_emb(x[None, ..., :16], x[None, ..., :16], cos[None], sin[None], unsqueeze_dim=2)
    torch.testing.assert_close(turned[..., :16], whole[0])
    assert HeadConfig.from_hf(ours.to_hf()).rope == ours.rope


def test_41_dynamic_is_no_scaling_within_the_heads_positions() -> None:
    """Catches a factor applied where transformers applies none: beyond these positions nothing is drafted (scenario 41)."""
    raw = SIZES | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    config, positions = HeadConfig.from_hf(raw), torch.arange(4096)
    found = Rotary(config.head_dim, config.max_positions, config.rope).angles(positions)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))(torch.zeros(1), positions[None])
    for angle, want in zip(found, theirs, strict=True):
        torch.testing.assert_close(torch.cat((angle, angle), -1).squeeze(1), want[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "rope_type='longrope' of the head is not",
        ),
        ({"rope_type": "default", "mrope_section": [8, 4, 4]}, r"rotary setting mrope_section=\[8, 4, 4\] .* is not supported"),
        ({"sliding_attention": {"rope_type": "default"}}, "rotary setting sliding_attention="),
    ],
)
def test_41_what_is_not_implemented_is_named(settings: dict[str, Any], message: str) -> None:
    """Catches rotary settings that hang on a text's length, on images or on the layer, read as plain ones (scenario 41)."""
    with pytest.raises(HeadError, match=message):
        HeadConfig.from_hf(SIZES | {"rope_parameters": settings})


def test_41_an_unknown_kind_is_named() -> None:
    """Catches a kind of scaling read as no scaling (scenario 41)."""
    with pytest.raises(HeadError, match=r"rope_type='spiral' of the head is not supported; known: default, .*llama3"):
        HeadConfig.from_hf(SIZES | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0}})

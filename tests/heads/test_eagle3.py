"""The EAGLE-3 head against its equations in plain torch, and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from vllm_eagle.errors import HeadError
from vllm_eagle.heads import Eagle3Head, EagleHead, HeadConfig, default_aux_layers, load_head, save_head
from vllm_eagle.testing import tiny_head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_head(tmp_path / "head", draft_vocab=100))


@pytest.fixture
def head(folder: Path) -> Eagle3Head:
    loaded = load_head(folder)
    assert isinstance(loaded, Eagle3Head)
    return loaded


def edit(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **changes: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if name not in drop}, folder / "model.safetensors")


def test_one_step_is_the_papers(folder: Path, head: Eagle3Head) -> None:
    """Catches embedding and feature exchanged, a normed residual, one norm for both inputs, an output after the norm."""
    w = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    embeddings, states, lm_head = torch.randn(7, 64), torch.randn(7, 192), torch.randn(100, 64)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (64,), w[name], head.config.rms_norm_eps)

    def heads(name: str) -> Tensor:
        return (both @ w[f"midlayer.self_attn.{name}.weight"].T).view(1, 7, -1, 32).transpose(1, 2)

    fused = states @ w["fc.weight"].T
    both = torch.cat((norm(embeddings, "midlayer.input_layernorm.weight"), norm(fused, "midlayer.hidden_norm.weight")), -1)
    assert w["midlayer.self_attn.q_proj.weight"].shape == (128, 128)  # reads 2 x 64
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32))
    query, key = apply_rotary_pos_emb(heads("q_proj"), heads("k_proj"), *rotary(both, torch.arange(3, 10)[None]))
    mixed = F.scaled_dot_product_attention(query, key, heads("v_proj"), is_causal=True, enable_gqa=True)
    x = fused + mixed[0].transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
    normed = norm(x, "midlayer.post_attention_layernorm.weight")
    gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    expected = x + (F.silu(normed @ gate) * (normed @ up)) @ down

    def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    out = head(embeddings, head.fuse(states), torch.arange(3, 10), causal)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    hidden, rows = head.readout(out, lm_head)
    torch.testing.assert_close(hidden @ rows.T, norm(expected, "norm.weight") @ w["lm_head.weight"].T, rtol=1e-4, atol=1e-4)


def test_round_trip_is_exact(head: Eagle3Head, tmp_path: Path) -> None:
    """Catches a tensor renamed or dropped, and the map of the draft vocabulary cast to the weights' dtype."""
    save_head(head, tmp_path / "again", torch.float32)
    again = load_head(tmp_path / "again")
    assert again.config == head.config
    assert again.config.aux_layers == (0, 1, 1)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    save_head(head, tmp_path / "narrow")
    stored = load_file(tmp_path / "narrow" / "model.safetensors")
    assert (stored["d2t"].dtype, stored["t2d"].dtype, stored["fc.weight"].dtype) == (torch.int64, torch.bool, torch.bfloat16)
    assert torch.equal(load_head(tmp_path / "narrow").vocabulary, head.vocabulary)


def test_the_map_is_an_offset(head: Eagle3Head) -> None:
    """Catches d2t written as tokens, and t2d that marks rows."""
    tokens = torch.arange(100) * 2 + 5
    head.set_vocabulary(tokens)
    assert head.d2t.tolist() == [5 + i for i in range(100)]
    assert head.t2d.nonzero().squeeze(1).tolist() == head.vocabulary.tolist() == tokens.tolist()


def test_a_whole_vocabulary_needs_no_map(folder: Path) -> None:
    """Catches a released head refused: nothing is mapped where every token has a row."""
    edit_tensors(folder, drop=("d2t", "t2d"))
    with pytest.raises(HeadError, match="tensor d2t, t2d is missing for an EAGLE-3 head"):
        load_head(folder)
    edit(folder, vocab_size=100)
    head = load_head(folder)
    assert isinstance(head, Eagle3Head)
    assert head.vocabulary.tolist() == list(range(100))


def test_layer_ids_in_both_places(folder: Path) -> None:
    """Catches ids lost or shifted by one, and a head without ids that reads nothing."""
    name = "eagle_aux_hidden_state_layer_ids"
    for nested in (name, "layer_ids"):
        edit(folder, drop=(name,), eagle_config={nested: [1, 5, 9]})
        config = load_head(folder).config
        assert (config.aux_layers, config.states_read(32)) == ((1, 5, 9), (1, 5, 9))
    edit(folder, eagle_config={})
    assert load_head(folder).config.states_read(32) == (2, 16, 29)
    edit(folder, **{name: [1, 2]})
    with pytest.raises(HeadError, match="must name 3 layers"):
        load_head(folder)


def test_default_layers() -> None:
    """Catches ids outside a small target, and two that are the same layer."""
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(7) == (2, 3, 4)
    for layers in range(3, 80):
        low, middle, high = default_aux_layers(layers)
        assert 0 <= low < middle < high < layers
    with pytest.raises(HeadError, match="the target has 2 layers"):
        default_aux_layers(2)


def test_kinds_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """Catches one kind read as the other; released heads of both kinds call themselves LlamaForCausalLM."""
    assert isinstance(load_head(folder), Eagle3Head)
    edit(folder, architectures=["LlamaForCausalLM"])
    assert isinstance(load_head(folder), Eagle3Head)
    edit(folder, drop=("draft_vocab_size",))
    with pytest.raises(HeadError, match=r"tensor layers\.0\..* is missing for an EAGLE-1 head"):
        load_head(folder)
    assert isinstance(load_head(tiny_head(tmp_path / "first")), EagleHead)
    assert HeadConfig.from_hf(load_head(tmp_path / "first").config.to_hf()).kind == "EAGLE-1"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"fc_norm": True}, r"tensor fc_norm\.0\.weight, .* is missing"),
        ({"num_hidden_layers": 2}, r"tensor layers\.1\..* is missing"),
        ({"target_hidden_size": 128}, r"tensor embed_tokens\.weight is missing"),
        ({"num_aux_hidden_states": 4}, r"\[0, 1, 1\] must name 4 layers"),
        ({"layernorms": True}, "layernorms=True is not supported for an EAGLE-3 head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"eagle_config\.use_aux_hidden_state=False is not supported"),
        ({"draft_vocab_size": 99}, r"shape \[100\], its config.json implies \[99\]"),
        ({"bias": True}, r"tensor fc\.bias is missing for an EAGLE-3 head"),
    ],
)
def test_bad_configs(folder: Path, config: dict[str, Any], message: str) -> None:
    """Catches a flag that changes arithmetic and is dropped in silence."""
    edit(folder, **config)
    with pytest.raises(HeadError, match=message):
        load_head(folder)


def test_bad_maps(folder: Path) -> None:
    """Catches a map that sends drafts to tokens the head was not trained for."""
    head = load_head(folder)
    assert isinstance(head, Eagle3Head)
    edit_tensors(folder, d2t=head.vocabulary)
    with pytest.raises(HeadError, match=r"head: d2t and t2d do not name the same tokens; d2t must hold offsets"):
        load_head(folder)
    edit_tensors(folder, d2t=head.d2t, **{"midlayer.extra.weight": torch.zeros(1)})
    with pytest.raises(HeadError, match=r"tensor midlayer\.extra\.weight is not part of an EAGLE-3 head"):
        load_head(folder)

"""The `speculators` layout against ours, and against the library where it can be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.train.naive import causal, random_head
from vllm_eagle.errors import HeadError
from vllm_eagle.heads import EagleHead, HeadConfig, load_head, save_head, save_speculators

CONFIG = HeadConfig(32, 64, 1, 4, 2, 8, 128, 1e-6, 2048, fusion_bias=True, qkv_bias=False)
VERIFIER = {"name_or_path": "toy", "architectures": ["LlamaForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


def _same(a: EagleHead, b: EagleHead) -> bool:
    state, other = a.state_dict(), b.state_dict()
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, fusion_bias=False, rope=LLAMA3)])
def test_there_and_back_bit_for_bit(config: HeadConfig, tmp_path: Path) -> None:
    """Catches a tensor renamed wrongly, a number rounded, and a rotary setting or bias lost in the nested config."""
    head = random_head(config)
    save_speculators(head, tmp_path / "there", VERIFIER, torch.float32)
    back = load_head(tmp_path / "there", None)
    assert back.config == config
    assert _same(head, back)
    save_head(back, tmp_path / "here", torch.float32)
    assert _same(head, load_head(tmp_path / "here"))


def test_names_and_flags_are_the_documented_ones(tmp_path: Path) -> None:
    """Catches a layout only we can read."""
    save_speculators(random_head(CONFIG), tmp_path, VERIFIER)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["speculators_model_type"], raw["layernorms"], raw["fusion_bias"]) == ("eagle", False, True)
    assert raw["transformer_layer_config"]["num_hidden_layers"] == 1
    assert raw["speculators_config"]["verifier"] == VERIFIER
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {name.split(".")[0] for name in names} == {"fusion_fc", "transformer"}
    assert {"fusion_fc.bias", "transformer.self_attn.q_proj.weight", "transformer.post_attention_layernorm.weight"} <= names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3' is not supported"),
        ({"layernorms": True}, "layernorms=true is not supported"),
        ({"transformer_layer_config": None}, "no 'transformer_layer_config'"),
    ],
)
def test_what_would_change_arithmetic_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    """Catches a head of another kind that loads and drafts nonsense."""
    save_speculators(random_head(CONFIG), tmp_path, VERIFIER)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(HeadError, match=message):
        load_head(tmp_path)


def test_two_layers_have_no_place(tmp_path: Path) -> None:
    """Catches a second layer that is dropped without a word."""
    with pytest.raises(HeadError, match="holds 1 decoder layer, this head has 2"):
        save_speculators(random_head(replace(CONFIG, num_layers=2)), tmp_path, VERIFIER)


_LIBRARY = """
import sys, torch
from speculators.models.eagle import EagleSpeculator, EagleSpeculatorConfig
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
shape = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, rope_theta=10000.0, tie_word_embeddings=False)
target = LlamaForCausalLM(LlamaConfig(**shape)).eval()
head, info = EagleSpeculator.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["unexpected_keys"] and not info["mismatched_keys"], info
head.attach_verifier(target, mode="train_only")
tokens, features = torch.arange(20)[None] * 5 % 128, torch.randn(1, 20, 32)
logits = head.eval()(tokens, features, attention_mask=torch.ones_like(tokens)).logits[0]  # without a mask: not causal
torch.save({"tokens": tokens[0], "features": features[0], "logits": logits, "embedding": head.embed_tokens.weight,
            "lm_head": head.lm_head.weight}, sys.argv[2])
"""


def test_the_library_computes_the_same(tmp_path: Path) -> None:
    """Catches a layout that the library reads and runs otherwise. SPECULATORS_PATH may name a folder that holds it."""
    path = os.pathsep.join(filter(None, [os.environ.get("SPECULATORS_PATH"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", "import speculators.models.eagle"], capture_output=True, env=environment)
    if found.returncode:
        pytest.skip(
            "needs the package speculators with EAGLE-1 (0.1.0 has it, 0.9.0 not), and the transformers below 4.54 it wants"
        )
    head = random_head(CONFIG)
    save_speculators(head, tmp_path / "there", VERIFIER | {"name_or_path": None}, torch.float32)  # a name would be fetched
    command = [sys.executable, "-c", _LIBRARY, str(tmp_path / "there"), str(tmp_path / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Tensor] = torch.load(tmp_path / "out.pt")
    mine = head(out["embedding"][out["tokens"]], out["features"], torch.arange(20), causal) @ out["lm_head"].T
    torch.testing.assert_close(mine, out["logits"], rtol=1e-4, atol=1e-4)

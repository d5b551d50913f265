"""The `speculators` layout against ours, and against the library where it can be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.heads.variants import EAGLE3
from tests.heads.variants import random_head as random_variant
from tests.train.naive import causal, random_head
from vllm_eagle.drafting.reference import next_feature
from vllm_eagle.errors import HeadError
from vllm_eagle.heads import AnyHead, Eagle3Head, EagleHead, HeadConfig, load_head, save_head, save_speculators
from vllm_eagle.heads.flags import NORM_FLAGS

CONFIG = HeadConfig(32, 64, 1, 4, 2, 8, 128, 1e-6, 2048, fusion_bias=True, qkv_bias=False)
VERIFIER = {"name_or_path": "toy", "architectures": ["LlamaForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


def _same(a: AnyHead, b: AnyHead) -> bool:
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
        ({"speculators_model_type": "peagle"}, "'peagle' is not supported"),
        ({"speculators_model_type": "eagle3"}, r"tensor .*norm\.weight is missing for an EAGLE-3 head"),
        ({"layernorms": True}, r"tensor embedding_layernorm\.weight, pre_lm_head_layernorm\.weight, .* is missing"),
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


def run_library(script: str, wanted: str, *arguments: Path) -> None:
    """Run a script where the library is; SPECULATORS_PATH may name a folder that holds it."""
    path = os.pathsep.join(filter(None, [os.environ.get("SPECULATORS_PATH"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, env=environment)
    if done.returncode and done.stderr.strip().splitlines()[-1].startswith(("ModuleNotFoundError", "ImportError")):
        pytest.skip(f"needs {wanted}; SPECULATORS_PATH may name a folder that holds it")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("layernorms", [False, True])
def test_the_library_computes_the_same(layernorms: bool, tmp_path: Path) -> None:
    """Catches a layout that the library reads and runs otherwise."""
    head = random_head(replace(CONFIG, layernorms=layernorms))
    assert isinstance(head, EagleHead)
    save_speculators(head, tmp_path / "there", VERIFIER | {"name_or_path": None}, torch.float32)  # a name would be fetched
    wanted = "the package speculators with EAGLE-1 (0.1.0 has it, 0.9.0 not), and the transformers below 4.54 it wants"
    run_library(_LIBRARY, wanted, tmp_path / "there", tmp_path / "out.pt")
    out: dict[str, Tensor] = torch.load(tmp_path / "out.pt")
    mine = head(out["embedding"][out["tokens"]], out["features"], torch.arange(20), causal)
    hidden, rows = head.readout(mine, out["lm_head"])
    torch.testing.assert_close(hidden @ rows.T, out["logits"], rtol=1e-4, atol=1e-4)


_LIBRARY3 = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig
torch.manual_seed(0)
tokens, states = torch.randint(96, (1, 14)), torch.randn(1, 14, 96)

def run(head):
    found = []
    head.lm_head.register_forward_hook(lambda module, args, logits: found.append(logits[0].detach()))
    head.eval()(states, tokens, torch.zeros_like(tokens), ttt_steps=4)
    return torch.stack(found)

def read(folder):
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel.from_pretrained(folder, config=config)
    stored, state = load_file(folder / "model.safetensors"), head.state_dict()
    assert set(state) - set(stored) <= {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    return head

def write(folder, flags):
    layer = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                        head_dim=8, num_hidden_layers=flags.pop("layers"), attention_bias=flags.pop("bias"))
    layer._attn_implementation = "eager"
    how = SpeculatorsConfig(algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                            default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]))
    head = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=40, speculators_config=how,
                                                   eagle_aux_hidden_state_layer_ids=[1, 2, 4], **flags))
    for weight in head.parameters():
        weight.data.normal_(std=0.2) if weight.dim() > 1 else weight.data.uniform_(0.3, 1.7)
    kept = torch.randperm(96)[:40].sort().values
    head.d2t.copy_(kept - torch.arange(40))
    head.t2d[kept] = True
    head.save_pretrained(folder)
    return head

out = {"tokens": tokens[0], "states": states[0]}
with torch.no_grad():
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        ours, theirs = read(folder / "ours"), write(folder / "theirs", json.loads((folder / "flags.json").read_text()))
        out[folder.name] = {"ours": run(ours), "theirs": run(theirs), "embedding": ours.embed_tokens.weight}
torch.save(out, sys.argv[2])
"""
CASES3 = ("plain", "norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "two layers", "biases", "embedding")


def test_70_real_objects_of_the_library_both_ways(tmp_path: Path) -> None:
    """Catches what the library writes read otherwise, and what we write run otherwise, at depths 1 to 4 (scenarios 69, 70)."""
    folders, verifier = tmp_path / "heads", tmp_path / "verifier"
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(verifier)
    for case in CASES3:
        config = replace(EAGLE3[case], rms_norm_eps=1e-6)
        save_speculators(
            random_variant(config), folders / case / "ours", VERIFIER | {"name_or_path": str(verifier)}, torch.float32
        )
        flags = {name: getattr(config, name) for name in NORM_FLAGS} | {"layers": config.num_layers, "bias": config.o_bias}
        (folders / case / "flags.json").write_text(json.dumps(flags))
    run_library(_LIBRARY3, "the package speculators with EAGLE-3 (0.9.0 has it)", folders, tmp_path / "out.pt")
    out: dict[str, Any] = torch.load(tmp_path / "out.pt")
    for case in CASES3:
        for who in ("ours", "theirs"):
            head = load_head(folders / case / who)
            assert isinstance(head, Eagle3Head)
            assert head.config.own_embedding == (who == "theirs" or case == "embedding")
            found = unrolled(head, head.embedding(out[case]["embedding"]), out["tokens"], out["states"], 4)
            torch.testing.assert_close(found, out[case][who][:, : found.shape[1]], rtol=1e-4, atol=1e-4, msg=f"{case}, {who}")


def unrolled(head: Eagle3Head, embedding: Tensor, tokens: Tensor, states: Tensor, depths: int) -> Tensor:
    """Return the logits [depths, T-depths, S] of drafts that start at each position and go along the true tokens."""
    rows: list[list[Tensor]] = [[] for _ in range(depths)]
    for i in range(len(tokens) - depths):
        certain, own = torch.cat((tokens[:1], tokens[: i + 1])), states[:0, : head.config.hidden_size]
        for depth in range(depths):
            path = tokens[i + 1 : i + 1 + depth].tolist()
            out = next_feature(head, embedding.__getitem__, states[: i + 1], certain, path, own)
            own = torch.cat((own, out[None]))
            hidden, lm_head = head.readout(out, torch.empty(0))
            rows[depth].append(lm_head @ hidden)
    return torch.stack([torch.stack(row) for row in rows])

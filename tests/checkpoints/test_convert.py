"""Heads written again in another layout, and back: the same bytes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.heads.variants import CASES, edit_tensors, random_head, write
from vllm_eagle.cli import main
from vllm_eagle.errors import HeadError
from vllm_eagle.heads import load_head, save_head, save_speculators

BOTH = [
    name for name in CASES if f"speculators {name.partition(' ')[2]}" in CASES and f"original {name.partition(' ')[2]}" in CASES
]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Write the configuration of a model the heads of the cases fit."""
    folder = tmp_path / "toy"
    folder.mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "vocab_size": 96, "num_attention_heads": 4, "intermediate_size": 48}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BOTH)
def test_there_and_back_bit_for_bit(name: str, dtype: torch.dtype, target: Path, tmp_path: Path) -> None:
    """Catches a number rounded, a tensor or a setting lost, a map or an embedding made up (scenario 68)."""
    first, there, back = write(name, tmp_path / "first", dtype), tmp_path / "there", tmp_path / "back"
    layouts = ["original", "speculators"] if name.startswith("speculators") else ["speculators", "original"]
    for head, layout, out in ((first, layouts[0], there), (there, layouts[1], back)):
        assert main(["convert", str(head), "--layout", layout, "--out", str(out), "--model", str(target)]) == 0
    for file in ("model.safetensors", "config.json"):
        assert (back / file).read_bytes() == (first / file).read_bytes()
    assert load_head(there, None).config == load_head(first, None).config
    assert load_head(there, None).fc.weight.dtype == dtype


def test_what_lies_beside_a_head_goes_along(tmp_path: Path) -> None:
    """Catches a head that loses its vocabulary or its card, or numbers of two dtypes made one."""
    head, out = write("original EAGLE-1, plain", tmp_path / "head", torch.bfloat16), tmp_path / "out"
    tensors = load_file(head / "model.safetensors")
    norm = next(name for name in tensors if "norm" in name)
    save_file(tensors | {norm: tensors[norm].float()}, head / "model.safetensors", metadata={"format": "pt"})
    (head / "draft_vocab.json").write_text("[1, 2]\n")
    (head / "README.md").write_text("a card\n")
    assert main(["convert", str(head), "--layout", "original", "--out", str(out)]) == 0
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors", "draft_vocab.json", "README.md"}
    assert (out / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()


def test_layers_and_legacy_names_are_renewed(tmp_path: Path) -> None:
    """Catches an override that is not written, and names written that only old releases know (scenario 70)."""
    head, out = write("speculators EAGLE-3, fc_norm", tmp_path / "head"), tmp_path / "out"
    tensors = load_file(head / "model.safetensors")
    legacy = {f"aux_norm_{part}.weight": tensors[f"fc_norm.{i}.weight"] for i, part in enumerate(("low", "mid", "high"))}
    edit_tensors(head, drop=tuple(f"fc_norm.{i}.weight" for i in range(3)), **legacy)
    assert main(["convert", str(head), "--layout", "speculators", "--out", str(out), "--aux-layers", "3,0,5"]) == 0
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[name], tensors[name]) for name in tensors) and len(written) == len(tensors)
    assert json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [3, 0, 5]
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "toy"


NO_PLACE = [
    ("speculators EAGLE-1, layernorms", "original", "no place for the layernorms"),
    ("original EAGLE-1, two layers", "speculators", "holds 1 decoder layer, this head has 2"),
    ("original EAGLE-1, qkv_bias", "speculators", "no place for biases of q, k and v without one of o_proj"),
    ("original EAGLE-3, fusion bias", "speculators", r"no place for fc\.bias of an EAGLE-3 head"),
]


@pytest.mark.parametrize(("name", "layout", "message"), NO_PLACE)
def test_what_has_no_place_is_refused(name: str, layout: str, message: str, tmp_path: Path) -> None:
    """Catches a tensor that is dropped, or written where nobody reads it."""
    write(name, tmp_path / "head")
    head = random_head(CASES[name][1])
    save = save_head if layout == "original" else partial(save_speculators, verifier={})
    with pytest.raises(HeadError, match=message):
        save(head, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    line = ["convert", str(tmp_path / "head"), "--layout", layout, "--out", str(tmp_path / "out")]
    (tmp_path / "config.json").write_text("{}")
    assert main([*line, *(["--model", str(tmp_path)] if layout == "speculators" else [])]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "speculators", "--out", "x"], "give --model"),
        (["--layout", "original", "--out", "."], "is the head's own folder"),
        (["--layout", "speculators", "--out", "x", "--model", "nowhere"], "the target cannot be read"),
        (["--layout", "original", "--out", "x", "--aux-layers", "1,2,3"], "aux_layers has no effect on an EAGLE-1 head"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a head overwritten while it is read, and a traceback."""
    monkeypatch.chdir(write("original EAGLE-1, plain", tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["convert", ".", *words]) == 2
    assert message in capsys.readouterr().err

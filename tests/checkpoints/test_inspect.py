"""`vllm-eagle inspect`: what the documentation shows is what it prints, and its exit status says whether a head fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.heads.variants import CASES, edit_tensors, write
from vllm_eagle.cli import main

SHOWN = {
    "eagle1": "original EAGLE-1, plain",
    "hass": "speculators EAGLE-1, layernorms",
    "eagle3": "original EAGLE-3, plain",
    "eagle31": "speculators EAGLE-3, together",
}
"""Heads of docs/checkpoints.md."""
TARGET = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 6},
    **{"vocab_size": 96, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 1024},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with the heads of the documentation and two targets."""
    for name, case in SHOWN.items():
        write(case, tmp_path / name)
    for name, sizes in (("toy", {}), ("wide", {"hidden_size": 56, "max_position_embeddings": 128})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(TARGET | sizes))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def blocks(page: str) -> list[tuple[list[str], str, int]]:
    """Return command, output and exit status of every shown run of `inspect`."""
    found = re.findall(r"```\n\$ vllm-eagle (inspect [^\n]*)\n(.*?)\n(?:\$ echo \$\?\n(\d)\n)?```", page, re.DOTALL)
    return [(command.split(), output, int(status or 0)) for command, output, status in found]


def test_the_page_shows_what_is_printed(here: Path, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches documentation of another output than the command's, and a layout that is not shown."""
    shown = blocks((repository / "docs" / "checkpoints.md").read_text())
    assert {name for command, _, _ in shown for name in command if name in SHOWN} == set(SHOWN)
    for command, output, status in shown:
        assert main(command) == status
        assert capsys.readouterr().out.rstrip("\n") == output, command


@pytest.mark.parametrize("name", CASES)
def test_69_every_flag_that_is_on_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a setting that changes arithmetic and that nobody is told of (scenario 69)."""
    layout, config = CASES[name]
    assert main(["inspect", str(write(name, tmp_path))]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{config.kind} head, {layout} layout: {tmp_path}\n")
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "layernorms"):
        assert (f"{flag} yes" in out) == getattr(config, flag)
    for word, on in (("bias of fc", config.fusion_bias), ("of q, k, v", config.qkv_bias), ("of o_proj", config.o_bias)):
        assert f"{word} {'yes' if on else 'no'}" in out
    assert ("its own, unless" in out) == config.own_embedding
    assert f"rotary {config.rope['rope_type']} (" in out and f"norms' epsilon {config.rms_norm_eps}" in out
    assert f"{len(load_file(tmp_path / 'model.safetensors'))} used; unused: none; missing: none" in out
    if config.is_eagle3:
        assert f"inputs of {config.num_aux} layers of the target, {config.target_size} wide: {list(config.aux_layers)}" in out


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("hidden_size", {"hidden_size": 64}, "has hidden size 32, target bad has 64"),
    ("vocab_size", {"vocab_size": 97}, "has a vocabulary of 96, target bad of 97"),
    ("layers", {"num_hidden_layers": 3}, "reads layer 4, target bad has 3"),
]


@pytest.mark.parametrize(("name", "sizes", "message"), BAD, ids=[name for name, *_ in BAD])
def test_a_head_for_another_target(
    name: str, sizes: dict[str, Any], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a head that seems to fit, and a script that cannot tell."""
    (here / "bad").mkdir()
    (here / "bad" / "config.json").write_text(json.dumps(TARGET | sizes))
    assert main(["inspect", "eagle3", "--target", "bad"]) == 1
    out = capsys.readouterr().out
    assert message in out and "fits bad: no" in out and "serve it" not in out


def test_every_reason_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a report that stops at the first thing wrong, or at tensors that are missing."""
    (here / "bad").mkdir()
    (here / "bad" / "config.json").write_text(json.dumps(TARGET | {"hidden_size": 64, "vocab_size": 97}))
    edit_tensors(here / "eagle3", drop=("norm.weight",), spare=torch.zeros(1))
    assert main(["inspect", "eagle3", "--target", "bad"]) == 1
    out = capsys.readouterr().out
    assert out.count("  wrong ") == 3
    assert "unused: spare; missing: norm.weight" in out
    assert main(["inspect", "eagle3"]) == 1


def test_what_is_no_head(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, and a status that says a head was read."""
    raw = json.loads((here / "eagle1" / "config.json").read_text())
    (here / "eagle1" / "config.json").write_text(json.dumps(raw | {"residual_multiplier": 2.0}))
    for head, message in (
        ("eagle1", "residual_multiplier=2.0 is unknown"),
        ("toy", "no model.safetensors"),
        ("x", "no config"),
    ):
        assert main(["inspect", head]) == 2
        assert message in capsys.readouterr().err
    assert main(["inspect", "eagle3", "--target", "nowhere"]) == 2
    assert "the target cannot be read" in capsys.readouterr().err


def test_66_a_map_that_names_other_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a head called good whose numbers are not looked at (scenario 66)."""
    edit_tensors(here / "eagle3", d2t=torch.arange(40))
    assert main(["inspect", "eagle3"]) == 1
    assert "d2t and t2d do not name the same tokens" in capsys.readouterr().out


def test_layers_named_on_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an override that is shown and not served, or served and not shown (scenario 70)."""
    assert main(["inspect", "eagle3", "--target", "toy", "--aux-layers", "0,3,5"]) == 0
    out = capsys.readouterr().out
    assert "[0, 3, 5]" in out
    assert "vllm serve toy --speculative-model eagle3 --speculative-aux-layers 0,3,5" in out
    assert main(["inspect", "eagle3", "--target", "toy", "--aux-layers", "0,3,7"]) == 1
    raw = json.loads((here / "eagle3" / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": None}
    (here / "eagle3" / "config.json").write_text(json.dumps(raw))
    assert main(["inspect", "eagle3", "--target", "toy"]) == 0
    assert "wide: [2, 3, 4], the usual ones of 6" in capsys.readouterr().out

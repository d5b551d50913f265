from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.train.naive import random_head
from vllm_eagle.heads import load_head, save_head
from vllm_eagle.train.cli import main
from vllm_eagle.train.target import head_config
from vllm_eagle.train.words import Words


@pytest.fixture
def head(toy_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    save_head(random_head(head_config(toy_folder, 1)), folder)
    (folder / "draft_vocab.json").write_text("[1, 2]\n")
    (folder / "README.md").write_text("a card\n")
    return folder


def test_a_head_goes_there_and_back(head: Path, toy_folder: Path, tmp_path: Path) -> None:
    """Catches bfloat16 weights widened or rounded again, and a head that loses its vocabulary or its card."""
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["export", str(head), "--layout", "speculators", "--out", str(there), "--model", str(toy_folder)]) == 0
    assert main(["export", str(there), "--layout", "original", "--out", str(back)]) == 0
    assert (back / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((head / "config.json").read_text())
    assert load_head(there, None).fc.weight.dtype == torch.bfloat16
    for folder in (there, back):
        assert (folder / "draft_vocab.json").read_text() == "[1, 2]\n"
        assert (folder / "README.md").read_text() == "a card\n"


def test_an_eagle3_head_has_one_layout(
    toy_folder: Path, toy_draft_words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a map cast with the weights, and a layout that nobody reads."""
    head, there, back = tmp_path / "head", tmp_path / "there", tmp_path / "back"
    save_head(random_head(head_config(toy_folder, 1, None, 60, (0, 1, 2)), words=toy_draft_words), head)
    assert main(["export", str(head), "--layout", "original", "--out", str(back)]) == 0
    assert (back / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    assert main(["export", str(head), "--layout", "speculators", "--out", str(there), "--model", str(toy_folder)]) == 2
    assert "this one is EAGLE-3; use --layout original" in capsys.readouterr().err
    assert not there.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "speculators", "--out", "x"], "give --model"),
        (["--layout", "original", "--out", "."], "is the head's own folder"),
        (["--layout", "speculators", "--out", "x", "--model", "nowhere"], "the target cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a head overwritten while it is read, and a traceback."""
    monkeypatch.chdir(head)
    assert main(["export", ".", *words]) == 2
    assert message in capsys.readouterr().err

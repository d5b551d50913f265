from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.naive import random_head
from vllm_eagle.heads import save_head
from vllm_eagle.train.card import Provenance, write_card
from vllm_eagle.train.cli import main
from vllm_eagle.train.evaluate import Acceptance
from vllm_eagle.train.features import Example
from vllm_eagle.train.judge import judge
from vllm_eagle.train.settings import read_settings
from vllm_eagle.train.target import head_config
from vllm_eagle.tree import DynamicGrowth


def test_the_command_prints_what_the_function_finds(
    toy_folder: Path, toy_features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches tree options that are ignored, and figures that never reach the user."""
    save_head(random_head(head_config(toy_folder, 1)), tmp_path)
    tree = ["--tree-size", "9", "--tree-top-k", "3", "--tree-depth", "4"]
    words = ["evaluate", "--model", str(toy_folder), "--head", str(tmp_path), "--features", str(toy_features), *tree]
    assert main([*words, "--limit", "5"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = judge(toy_folder, tmp_path, toy_features, DynamicGrowth(size=9, depth=4, top_k=3), 5)
    assert line["answers"] == 5
    assert line["tree_length"] == pytest.approx(found.served.mean_length, abs=1e-3)
    assert line["alpha"] == pytest.approx(list(found.chain.rates), abs=1e-4)


def test_the_card_says_where_the_head_comes_from(
    toy_folder: Path, toy_features: Path, toy_examples: list[Example], tmp_path: Path
) -> None:
    """Catches a card without data, recipe, figures or licence."""
    save_head(random_head(head_config(toy_folder, 1)), tmp_path)
    judged = judge(toy_folder, tmp_path, toy_features, DynamicGrowth(size=9, depth=4, top_k=3), 2)
    settings = read_settings(None, ["steps=300", "depths=3"])
    write_card(tmp_path, Provenance("toy", toy_examples, settings, "an earlier head"), [judged])
    text = (tmp_path / "README.md").read_text()
    for part in (
        "license: apache-2.0",
        "2304 answer tokens",
        "depths = 3",
        "served tree of 9 nodes",
        "an earlier head",
        "torch ",
    ):
        assert part in text


def test_acceptance_is_conditional_and_length_counts_the_target() -> None:
    """Catches rates over all rounds, and a length without the target's own token."""
    found = Acceptance(drafted=(10, 5, 2), right=(5, 2, 0))
    assert found.rates == (0.5, 0.4, 0.0)
    assert found.mean_length == pytest.approx(1.7)

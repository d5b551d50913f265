"""Options: defaults, the draft vocabulary beside the head, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_eagle import EagleError, speculate
from vllm_eagle.config import Options


def test_defaults_and_round_trip() -> None:
    """Catches an option lost on its way through additional_config."""
    options = Options.from_mapping({"model": "head", "tree_size": 12})
    assert Options.from_mapping(options.to_mapping()) == options
    growth = options.growth()
    assert (growth.size, growth.depth, growth.top_k) == (12, 5, 8)
    assert speculate("head")["speculative_config"]["num_speculative_tokens"] == 25


def test_trees_follow_the_load_unless_their_shape_is_given(repository: Path) -> None:
    """Catches a server that is slower than plain decoding under load because nobody chose a size."""
    shape = repository / "configs" / "tree" / "eagle1_25.json"
    given: list[dict[str, object]] = [{}, {"tree_size": "auto"}, {"tree_depth": 3}, {"tree_size": 12}, {"tree": str(shape)}]
    adaptive = [Options.from_mapping({"model": "head", **one}).adaptive for one in given]
    assert adaptive == [True, True, True, False, False]


def test_static_tree(repository: Path) -> None:
    """Catches a static tree whose size vLLM is not told."""
    arguments = speculate("head", tree=str(repository / "configs" / "tree" / "eagle1_25.json"))
    assert arguments["speculative_config"]["num_speculative_tokens"] == 25


def test_vocabulary_beside_the_head(tmp_path: Path) -> None:
    """Catches the head's own list ignored, or used although the user said otherwise."""
    assert Options(model=str(tmp_path)).vocabulary_file() is None
    (tmp_path / "draft_vocab.json").write_text("[1]")
    assert Options(model=str(tmp_path)).vocabulary_file() == tmp_path / "draft_vocab.json"
    assert Options(model=str(tmp_path), draft_vocab="all").vocabulary_file() is None
    assert Options(model=str(tmp_path), draft_vocab="mine.json").vocabulary_file() == Path("mine.json")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "no head given"),
        ({"model": "h", "tree_size": "12"}, "tree_size='12': want a whole number"),
        ({"model": "h", "tree_size": True}, "tree_size=True: want a whole number"),
        ({"model": 3}, "model=3: want a string"),
        ({"model": "h", "depth": 3}, "unknown option 'depth'"),
        ({"model": "h", "drafter_options": {"a": 1}}, "drafter_options have no effect on the head"),
        ({"model": "h", "tree": "t.json", "tree_depth": 2}, "tree_depth has no effect on the static tree"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    """Catches an option accepted without effect."""
    with pytest.raises(EagleError, match=message):
        Options.from_mapping(raw)

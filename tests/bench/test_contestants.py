from __future__ import annotations

import pytest

from vllm_eagle.bench.contestants import Contestant, parse, parse_all
from vllm_eagle.errors import EagleError


def test_names_become_contestants() -> None:
    """Catches a size read as a depth, and a kind that is a beginning of another one."""
    assert parse("tree:12x4") == Contestant("tree:12x4", "tree", 12, 4)
    assert parse("chain:3") == Contestant("chain:3", "chain", 3)
    assert parse("hf-lookup") == Contestant("hf-lookup", "hf-lookup")
    assert parse("ngram").size is None


def test_plain_comes_first_and_once() -> None:
    """Catches ratios without a denominator, and a contestant measured twice."""
    assert [one.name for one in parse_all(["hf", "tree:8", "hf"], head=True)] == ["plain", "hf", "tree:8"]
    assert [one.name for one in parse_all(["ngram", "plain"], head=False)] == ["plain", "ngram"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trees", "unknown contestant 'trees'; known: plain, auto"),
        ("tree", "needs a size, as in tree:25"),
        ("chain:0", "chain takes 1 or more"),
        ("auto:8", "auto takes no size; write auto"),
        ("chain:3x2", "levels are for trees"),
        ("tree:64", "63"),
    ],
)
def test_bad_names_are_one_line(name: str, words: str) -> None:
    """Catches a mistake found only when the engine has started, minutes later."""
    with pytest.raises(EagleError) as bad:
        parse(name)
    assert words in str(bad.value)
    assert "\n" not in str(bad.value)


def test_a_head_is_asked_for() -> None:
    """Catches trees without a head that fail in their process."""
    with pytest.raises(EagleError, match="tree:8 drafts with a head; give --head"):
        parse_all(["ngram", "tree:8"], head=False)


def test_who_serves_what_and_promises_which_texts() -> None:
    """Catches Hugging Face asked for a batch, and sampled texts of a chain held against it."""
    assert parse("hf").serves(1) and not parse("hf-lookup").serves(2) and parse("chain:2").serves(64)
    promises = {name: parse(name).repeats(1.0) for name in ("plain", "auto", "tree:8", "chain:2", "ngram", "suffix", "hf")}
    assert [name for name, promised in promises.items() if promised] == ["plain", "auto", "tree:8"]
    assert all(parse(name).repeats(0.0) for name in promises)

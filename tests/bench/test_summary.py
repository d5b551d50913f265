from __future__ import annotations

from typing import Any

import pytest

from vllm_eagle.bench.child import Outcome, pace
from vllm_eagle.bench.journal import Cell, Measurement
from vllm_eagle.bench.machine import Model, limit
from vllm_eagle.bench.rounds import rotated
from vllm_eagle.bench.summary import losses, spread, summarise

CELL = Cell("mt", 0.0, 4)


def measured(name: str, number: int, seconds: float, tokens: int = 100, cell: Cell = CELL, **more: Any) -> Measurement:
    return Measurement(cell, number, name, seconds, tokens, **{"first": 0.1, "rest": 0.05, "texts": ["a", "b"], **more})


def rows(found: list[Measurement], names: list[str], failed: dict[str, str] | None = None) -> dict[str, Any]:
    (table,) = summarise(found, failed or {}, names, lambda concurrency: 10.0 * concurrency)
    assert table["plain_limit"] == 40
    return {row["contestant"]: row for row in table["rows"]}


def test_each_round_begins_with_another() -> None:
    """Catches a contestant that is always measured first, on a machine still cool."""
    assert [rotated("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_ratios_are_within_a_round() -> None:
    """Catches a ratio of medians: the machine halves its speed in round 1, for both."""
    seconds = {"plain": (10, 20, 10), "tree:8": (8, 10, 5)}
    found = [measured(name, number, taken) for name, all_taken in seconds.items() for number, taken in enumerate(all_taken)]
    row = rows(found, ["plain", "tree:8"])["tree:8"]
    assert row["tokens_per_s"] == {"median": 12.5, "min": 10, "max": 20}
    assert row["ratio"] == {"median": 2, "min": 1.25, "max": 2}  # 10/8, 20/10, 10/5; of the medians it would be 1.25
    assert rows(found, ["plain", "tree:8"])["plain"]["ratio"] == {"median": 1, "min": 1, "max": 1}


def test_ratios_are_of_rates() -> None:
    """Catches a ratio of seconds where sampled answers differ in length."""
    found = [measured("plain", 0, 10), measured("ngram", 0, 10, tokens=50)]
    assert rows(found, ["plain", "ngram"])["ngram"]["ratio"]["median"] == 0.5


def test_counts_are_added_up() -> None:
    """Catches a mean of means, and buckets of one round alone."""
    found = [
        measured("plain", 0, 1),
        measured("tree:8", 0, 1, drafts=10, drafted=80, accepted=5, sizes={"8": 10}),
        measured("plain", 1, 1),
        measured("tree:8", 1, 1, drafts=30, drafted=120, accepted=55, sizes={"4": 30, "8": 1}, texts=["a", "x"]),
    ]
    row = rows(found, ["plain", "tree:8"])["tree:8"]
    assert (row["accepted_length"], row["nodes"], row["drafts"]) == (2.5, 5, 40)
    assert row["sizes"] == {"8": 11, "4": 30}
    assert (row["equal_texts"], row["texts"]) == (3, 4)


def test_a_round_made_again_counts_once() -> None:
    """Catches a kill that leaves a measurement of half a round in the medians."""
    found = [measured("plain", 0, 99), measured("plain", 0, 10), measured("hf", 0, 5)]
    assert rows(found, ["plain", "hf"])["hf"]["ratio"]["median"] == 2
    assert rows(found, ["plain", "hf"])["plain"]["tokens_per_s"]["max"] == 10


def test_best_chain_and_the_absent() -> None:
    """Catches the wrong chain named best, and a row that vanishes instead of saying why."""
    found = [measured("plain", 0, 10), measured("chain:1", 0, 8), measured("chain:2", 0, 7), measured("chain:3", 0, 9)]
    said = rows(found, ["plain", "chain:1", "chain:2", "chain:3", "suffix", "hf", "ngram"], {"suffix": "no such package"})
    assert [name for name, row in said.items() if row.get("best_chain")] == ["chain:2"]
    assert said["suffix"]["absent"] == "no such package"
    assert "one request at a time" in said["hf"]["absent"] and said["ngram"]["absent"] == "not measured yet"


def test_91_auto_against_the_fastest_size() -> None:
    """Catches `auto` held against a method that has no head, against medians of other rounds, or not at all (scenario 91)."""
    seconds = {"plain": (10, 20), "tree:8": (8, 22), "tree:25": (12, 40), "chain:2": (9, 21), "auto": (10, 16), "ngram": (1, 1)}
    found = [measured(name, number, taken) for name, both in seconds.items() for number, taken in enumerate(both)]
    found.append(measured("chain:2", 2, 1))  # a round without auto
    (table,) = summarise(found, {}, list(seconds), float)
    assert table["auto_to_best"] == {"best": "tree:8", "median": 1.087, "min": 0.8, "max": 1.375}  # 8/10, 22/16
    assert losses([table], 1.08) == [] and losses([table], 1.09) == [table]
    (without,) = summarise([one for one in found if one.contestant != "auto"], {}, list(seconds), float)
    assert without["auto_to_best"] is None and losses([without], 1.0) == []


def test_sampled_texts_are_compared_where_they_must_be_equal() -> None:
    """Catches "0 of 2 equal" held against a method that promises the distribution only."""
    cell = Cell("mt", 1.0, 4)
    found = [measured(name, 0, 1, cell=cell) for name in ("plain", "auto", "chain:2")]
    said = rows(found, ["plain", "auto", "chain:2"])
    assert (said["auto"]["equal_texts"], said["chain:2"]["equal_texts"]) == (2, None)


def test_spread_and_pace() -> None:
    """Catches percentiles of nothing, and the first token counted among those after it."""
    assert spread([]) is None
    assert spread([3, 1, 2.00004]) == {"median": 2, "min": 1, "max": 3}
    first, rest = pace(10.0, [10.5, 11.5, 12.5], 5)
    assert (first, rest) == (0.5, [0.5])  # 2 seconds for 4 tokens, in two steps
    assert pace(10.0, [10.5], 1) == (0.5, [])


def test_an_outcome_is_reduced() -> None:
    """Catches texts compared by length, and a mean that one slow request moves."""
    one = Measurement.of(CELL, 0, "plain", Outcome(2.0, [[1, 2], [1, 3], [1, 2]], [0.1, 9.0, 0.3], [0.2, 0.4]))
    assert (one.tokens, one.first, round(one.rest or 0, 6)) == (6, 0.3, 0.3)
    assert one.texts[0] == one.texts[2] != one.texts[1]


@pytest.mark.parametrize(("concurrency", "wanted"), [(1, 50), (4, 200), (100, 1250)])
def test_the_limit_is_memory_first_then_arithmetic(concurrency: int, wanted: float) -> None:
    """Catches a limit that batches exceed: 100 M weights of 4 bytes at 20 GB/s, 250 GFLOP/s."""
    machine = {"read_gb_s": 20.0, "copy_gb_s": 18.0, "gemm_gflops": 250.0}
    assert limit(machine, Model(100_000_000, 1, 1), "float32", concurrency) == pytest.approx(wanted)

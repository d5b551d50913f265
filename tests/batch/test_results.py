from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_eagle.batch.results import Results, fingerprint
from vllm_eagle.errors import EagleError

JOB = {"rows": "a", "flags": ["--model", "m"]}


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_end_in_any_order_and_come_out_in_theirs(tmp_path: Path) -> None:
    """Catches results in the order they happened to end."""
    out = tmp_path / "out.jsonl"
    with Results(out, JOB) as results:
        for index in (2, 0, 3, 1):
            results.add(index, {"text": "é" * index})
        results.finish(4)
    assert read(out) == [{"index": index, "text": "é" * index} for index in range(4)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_kill_costs_half_a_line(cut: int, tmp_path: Path) -> None:
    """Catches a torn line read as a row, a whole one thrown away, and a row that is there twice."""
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    with Results(out, JOB) as results:
        for index in (1, 0):
            results.add(index, {"text": "abcdefgh"})
    part.write_bytes(part.read_bytes()[:-cut])
    with Results(out, JOB) as results:
        known = sorted(results.places)
        assert known == [1] if cut < 33 else known == []
        for index in {0, 1, 2} - set(known):
            results.add(index, {"text": "again"})
        results.finish(3)
    assert [row["index"] for row in read(out)] == [0, 1, 2]


def test_half_a_first_line(tmp_path: Path) -> None:
    """Catches a job killed before its first row that can never begin again."""
    (tmp_path / "out.jsonl.part").write_bytes(b'{"job": {"ro')
    with Results(tmp_path / "out.jsonl", JOB) as results:
        results.add(0, {})
        results.finish(1)
    assert read(tmp_path / "out.jsonl") == [{"index": 0}]


def test_nothing_is_mixed_or_overwritten(tmp_path: Path) -> None:
    """Catches two jobs in one file, results that are written over, and an end that is none."""
    out = tmp_path / "out.jsonl"
    with Results(out, JOB) as results:
        results.add(0, {})
        with pytest.raises(EagleError, match="1 of 2 rows have no result yet"):
            results.finish(2)
    with pytest.raises(EagleError, match="another job"):
        Results(out, JOB | {"flags": []})
    with Results(out, JOB) as results:
        results.finish(1)
    with pytest.raises(EagleError, match="is there already"):
        Results(out, JOB)
    with pytest.raises(EagleError, match="cannot be written"):
        Results(tmp_path / "no" / "out.jsonl", JOB)


def test_a_job_is_its_rows_and_its_flags(tmp_path: Path) -> None:
    """Catches an edited input continued as if it were the same."""
    path = tmp_path / "in.jsonl"
    path.write_text("a")
    first = fingerprint(path, ["--x"])
    assert first == fingerprint(path, ["--x"]) != fingerprint(path, [])
    path.write_text("b")
    assert fingerprint(path, ["--x"]) != first

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.fake import crew_of
from vllm_eagle.bench.child import Job
from vllm_eagle.bench.contestants import parse, parse_all
from vllm_eagle.bench.crew import ContestantFailed
from vllm_eagle.bench.journal import Cell, Journal
from vllm_eagle.bench.rounds import Plan
from vllm_eagle.bench.workloads import Workload
from vllm_eagle.errors import EagleError

JOB = Job([[1, 2], [3]], 4, 0.0, 1)


def run(folder: Path, kill_at: int) -> tuple[int, list[str]]:
    """Run the fakes and return the status and what they noted."""
    (folder / "noted").unlink(missing_ok=True)
    line = [sys.executable, "-m", "tests.bench.fake", "run", str(folder), str(kill_at)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    noted = folder / "noted"
    return done.returncode, noted.read_text().splitlines() if noted.exists() else []


def test_a_killed_run_goes_on(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an hour of measurements lost by a kill, half a round mixed with another's, and a failure tried for ever."""
    monkeypatch.chdir(repository)
    status, noted = run(tmp_path, kill_at=5)
    assert status == -9
    assert [line for line in noted if "start" not in line] == ["plain 1", "ngram 1", "hf 1", "ngram 1", "hf 1"]
    file = tmp_path / "measurements.jsonl"
    assert len(Journal(tmp_path, {"tokens": 4}).measurements) == 4
    with file.open("a") as journal:
        journal.write('{"measured": {"cell": {"workl')
    status, noted = run(tmp_path, kill_at=0)
    assert status == 0
    assert "start suffix" not in noted  # it has said why
    assert [line for line in noted if "start" not in line] == [
        *("ngram 1", "hf 1", "plain 1"),  # the round cut short, again and whole
        *("plain 2", "ngram 2", "ngram 2", "plain 2"),  # hf answers one request at a time
    ]
    journal_now = Journal(tmp_path, {"tokens": 4})
    assert journal_now.done(Cell("mt", 0.0, 1), 1) == {"plain", "ngram", "hf"}
    assert journal_now.failed == {"suffix": "ImportError: no package of that name"}
    assert run(tmp_path, kill_at=0) == (0, [])  # all is measured: nobody is started


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    """Catches figures of two runs in one report."""
    Journal(tmp_path, {"tokens": 4, "rounds": 3})
    with pytest.raises(EagleError, match=r"measurements of other rounds, tokens; give another --out"):
        Journal(tmp_path, {"tokens": 5, "rounds": 2})


def test_a_batch_needs_as_many_prompts() -> None:
    """Catches 64 at once that were 8, and a greedy minute at 1 that became an hour for their sake."""
    workload, plain = Workload("mt", ((1,), (2,), (3,))), parse_all([], head=False)
    plan = Plan(plain, (workload,), (0.0,), (1, 3), 2, 4, 1)
    jobs = [plan.job(cell, found) for cell, found in plan.cells()]
    assert [(job.concurrency, len(job.prompts)) for job in jobs] == [(1, 2), (3, 3)]
    with pytest.raises(EagleError, match="mt has 3 prompts, --concurrency 4 needs as many"):
        Plan(plain, (workload,), (0.0,), (4,), 2, 4, 1)


def test_processes_make_room(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches more processes than memory holds, and one that is started again although it lives."""
    monkeypatch.chdir(repository)
    crew = crew_of(tmp_path, resident=2)
    for name in ("plain", "ngram", "plain", "hf", "plain", "ngram"):
        outcome = crew.measure(parse(name), JOB)
        assert (outcome.seconds, outcome.ids) == (2.0 if name == "plain" else 1.0, [[1, 2], [1, 2]])
    crew.end()
    noted = (tmp_path / "noted").read_text().splitlines()
    assert [line for line in noted if "start" in line] == [f"start {name}" for name in ("plain", "ngram", "hf", "ngram")]


def test_who_fails_says_why(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process that dies in the middle taken for one that is slow, and a reason that is lost."""
    monkeypatch.chdir(repository)
    crew = crew_of(tmp_path)
    with pytest.raises(ContestantFailed, match=r"^ended with status 3: out of luck$"):
        crew.measure(parse("ngram"), Job([[1]], 13, 0.0, 1))
    with pytest.raises(ContestantFailed, match=r"^ImportError: no package of that name$"):
        crew.measure(parse("suffix"), JOB)
    assert crew.measure(parse("ngram"), JOB).seconds == 1.0  # a new process
    crew.end()


def test_every_line_is_whole(tmp_path: Path) -> None:
    """Catches a measurement appended to half a line, which a reader would drop with it."""
    journal = Journal(tmp_path, {})
    journal.path.write_text(journal.path.read_text() + '{"half')
    journal.fail("hf", "reason")
    assert json.loads(journal.path.read_text().splitlines()[-1]) == {"failed": {"hf": "reason"}}

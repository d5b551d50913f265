"""Measurements as they are made, one line each: a run that was killed goes on where it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from vllm_eagle.bench.child import Outcome
from vllm_eagle.errors import EagleError


@dataclass(frozen=True)
class Cell:
    """Name one comparison: these prompts, at this temperature, so many at once."""

    workload: str
    temperature: float
    concurrency: int


@dataclass(frozen=True)
class Measurement:
    """Hold one contestant's figures of one round of a cell."""

    cell: Cell
    round: int
    contestant: str
    seconds: float
    tokens: int
    first: float
    """Median seconds to the first token."""
    rest: float | None
    """Median seconds per token after it."""
    texts: list[str]
    """A digest of every answer's ids."""
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: Cell, number: int, contestant: str, outcome: Outcome) -> Measurement:
        """Reduce an outcome to what the report needs."""
        return cls(
            cell,
            number,
            contestant,
            outcome.seconds,
            sum(map(len, outcome.ids)),
            _median(outcome.first) or 0.0,
            _median(outcome.rest),
            [digest(ids) for ids in outcome.ids],
            outcome.drafts,
            outcome.drafted,
            outcome.accepted,
            outcome.sizes,
        )


def digest(value: object) -> str:
    """Return a short name for a JSON value, the same for equal ones."""
    return hashlib.sha1(json.dumps(value).encode()).hexdigest()[:12]


def _median(values: Sequence[float]) -> float | None:
    ordered, half = sorted(values), len(values) // 2
    if not ordered:
        return None
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Journal:
    """Keep `measurements.jsonl`: the arguments of the run, then a line for what the machine can do and for every result."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        """Read what is there; raises `EagleError` if it was made with other arguments."""
        self.path = folder / "measurements.jsonl"
        self.measurements: list[Measurement] = []
        self.failed: dict[str, str] = {}
        self.machine: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        lines = self._lines()
        if not lines:
            self._append({"arguments": arguments})
            return
        if (made := lines[0].get("arguments")) != (wanted := json.loads(json.dumps(arguments))):
            other = sorted(name for name in {*(made or {}), *wanted} if (made or {}).get(name) != wanted.get(name))
            raise EagleError(
                f"{folder} holds measurements of other {', '.join(other)}; give another --out, or remove that folder"
            )
        for line in lines[1:]:
            if "measured" in line:
                self.measurements.append(Measurement(Cell(**line["measured"].pop("cell")), **line["measured"]))
            else:
                self.failed |= line.get("failed", {})
                self.machine |= line.get("machine", {})

    def know(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Write down what the machine can do, and return it."""
        self.machine = machine
        self._append({"machine": machine})
        return machine

    def add(self, measurement: Measurement) -> None:
        """Write a measurement at once."""
        self.measurements.append(measurement)
        self._append({"measured": dataclasses.asdict(measurement)})

    def fail(self, contestant: str, reason: str) -> None:
        """Write down why a contestant is out."""
        self.failed[contestant] = reason
        self._append({"failed": {contestant: reason}})

    def done(self, cell: Cell, number: int) -> set[str]:
        """Return who was measured in a round."""
        return {m.contestant for m in self.measurements if (m.cell, m.round) == (cell, number)}

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a+") as file:
            _end_torn_line(file)
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        for text in self.path.read_text().splitlines() if self.path.is_file() else ():
            with suppress(ValueError):  # a line torn by a kill
                found.append(json.loads(text))
        return found


def _end_torn_line(file: TextIO) -> None:
    """Begin a new line where a kill left half of one."""
    if end := file.tell():
        file.seek(end - 1)
        if file.read(1) != "\n":
            file.write("\n")

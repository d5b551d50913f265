"""What a contestant's process hears and says: one line of JSON each, settings first, then jobs.

bench    settings            job                job
process            ready           outcome            outcome        {"failed": reason} in place of either
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Say how a contestant's engine is to be made; the same for all but their names."""

    contestant: str
    model: str
    head: str | None
    dtype: str
    compiled: bool
    max_len: int
    """Longest prompt and answer, in tokens."""
    concurrency: int
    """Most requests at once."""
    cache_bytes: int
    """Size of the K/V cache."""


@dataclass(frozen=True)
class Job:
    """Hold prompts to answer, `concurrency` at a time; request i is seeded with i where a temperature is given."""

    prompts: Sequence[Sequence[int]]
    tokens: int
    temperature: float
    concurrency: int


@dataclass(frozen=True)
class Outcome:
    """What came of a job; the lists go by request."""

    seconds: float
    ids: list[list[int]]
    first: list[float]
    """Seconds to the first token."""
    rest: list[float]
    """Seconds per token after it, nothing for answers of one token."""
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """How many trees had how many nodes: upper limit of a bucket -> count."""


Answer = Callable[[Job], Outcome]


def pace(asked: float, arrived: Sequence[float], tokens: int) -> tuple[float, list[float]]:
    """Return the seconds to the first token, and those per token after it, of a request whose tokens came in these moments."""
    first = arrived[0] - asked
    after = tokens - 1
    return first, [(arrived[-1] - arrived[0]) / after] if after > 0 and len(arrived) > 1 else []


def serve(start: Callable[[Settings], Answer]) -> None:
    """Make the engine, then answer jobs until standard input ends; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=out, flush=True)

        try:
            answer = start(Settings(**json.loads(sys.stdin.readline())))
            say({"ready": True})
            for line in sys.stdin:
                say(dataclasses.asdict(answer(Job(**json.loads(line)))))
        except Exception as bad:  # whatever it is, it is a row of the report
            say({"failed": f"{type(bad).__name__}: {' '.join(str(bad).split())}"})
            raise

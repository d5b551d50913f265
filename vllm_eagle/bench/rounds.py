"""The rounds: in each one every contestant is measured once, and the first one is another every time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from vllm_eagle.bench.child import Job, Outcome
from vllm_eagle.bench.contestants import PLAIN, Contestant
from vllm_eagle.bench.crew import ContestantFailed
from vllm_eagle.bench.journal import Cell, Journal, Measurement
from vllm_eagle.bench.workloads import Workload
from vllm_eagle.errors import EagleError
from vllm_eagle.train.progress import Progress

Item = TypeVar("Item")


class Measures(Protocol):
    """Do a contestant's job."""

    def measure(self, contestant: Contestant, job: Job) -> Outcome: ...


@dataclass(frozen=True)
class Plan:
    """Say what is measured."""

    contestants: tuple[Contestant, ...]
    workloads: tuple[Workload, ...]
    temperatures: tuple[float, ...]
    concurrency: tuple[int, ...]
    count: int
    """Prompts of a workload, more where more are asked at once."""
    tokens: int
    rounds: int

    def __post_init__(self) -> None:
        most = max(self.concurrency)
        for workload in self.workloads:
            if len(workload.prompts) < most:
                raise EagleError(f"{workload.name} has {len(workload.prompts)} prompts, --concurrency {most} needs as many")

    def job(self, cell: Cell, workload: Workload) -> Job:
        """Return what a contestant does in a cell."""
        some = workload.prompts[: max(self.count, cell.concurrency)]
        return Job(some, self.tokens, cell.temperature, cell.concurrency)

    def cells(self) -> Iterator[tuple[Cell, Workload]]:
        """Yield every cell with its prompts."""
        for workload in self.workloads:
            for temperature in self.temperatures:
                for concurrency in self.concurrency:
                    yield Cell(workload.name, temperature, concurrency), workload

    def taking_part(self, cell: Cell, failed: Mapping[str, str]) -> list[Contestant]:
        """Return who can be measured in a cell."""
        return [one for one in self.contestants if one.serves(cell.concurrency) and one.name not in failed]


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Return the order of a round: each begins with the next one."""
    first = number % max(1, len(items))
    return [*items[first:], *items[:first]]


def race(plan: Plan, crew: Measures, journal: Journal) -> None:
    """Measure what the journal does not have yet; a round cut short is made again, since its ratios are within it.

    Raises `EagleError` if plain decoding itself fails; another contestant that fails is out.
    """
    rounds = [(cell, workload, number) for cell, workload in plan.cells() for number in range(plan.rounds)]
    open_rounds = [
        (cell, workload, number)
        for cell, workload, number in rounds
        if not {one.name for one in plan.taking_part(cell, journal.failed)} <= journal.done(cell, number)
    ]
    total, left = (sum(len(plan.taking_part(cell, journal.failed)) for cell, *_ in some) for some in (rounds, open_rounds))
    progress = Progress("bench", total, total - left)
    for place, (cell, workload, number) in enumerate(open_rounds, 1):
        job = plan.job(cell, workload)
        for contestant in rotated(plan.taking_part(cell, journal.failed), number):
            try:
                measured = Measurement.of(cell, number, contestant.name, crew.measure(contestant, job))
            except ContestantFailed as bad:
                if contestant.name == PLAIN:
                    raise EagleError(f"plain vLLM cannot be measured: {bad}") from None
                journal.fail(contestant.name, str(bad))
                progress.total -= sum(contestant.serves(later.concurrency) for later, *_ in open_rounds[place:])
                progress.add(0, note=f" · {contestant.name} is out: {bad}")
                continue
            journal.add(measured)
            rate, what = measured.tokens / measured.seconds, f"{cell.concurrency} at once, T={cell.temperature:g}"
            progress.add(0, note=f" · {contestant.name} {rate:.1f} tokens/s, {what}, {cell.workload}")

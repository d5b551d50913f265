"""What one answer's steps were like: the trees, what was accepted of them, and what they took."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TracedStep:
    """Hold one step of a request; row 0 of its tree is the root, the last certain token."""

    tokens: list[int]  # [N] of the tree
    parents: list[int]  # [N] rows, -1 for the root
    guesses: list[float]  # [N] the head's probability of each row after its parent; 1 for the root
    accepted: list[int]  # rows in order
    emitted: list[int]  # the accepted tokens, and the one the target added
    rows: int
    """Rows of the target's pass that were this request's; more than the tree's where it read a prompt."""
    requests: int
    """In the batch; the milliseconds below are the whole batch's."""
    draft_ms: float
    """Spent on growing this step's trees, at the end of the step before."""
    verify_ms: float
    commit_ms: float


@dataclass(frozen=True)
class Trace:
    """Hold the steps of one answer."""

    request: str
    model: str
    head: str
    steps: list[TracedStep]

    def cut(self, length: int) -> Trace:
        """Return the trace of the first `length` tokens: a step may write past a stop, which nobody gets to see."""
        steps, left = [], length
        for step in self.steps:
            if left <= 0:
                break
            emitted = step.emitted[:left]
            steps.append(dataclasses.replace(step, emitted=emitted, accepted=step.accepted[: len(emitted)]))
            left -= len(emitted)
        return dataclasses.replace(self, steps=steps)

    def cut_at(self, stops: Sequence[int], most: int | None) -> Trace:
        """Return the trace up to the first of the tokens `stops`, itself included, and of at most `most` tokens."""
        written = [token for step in self.steps for token in step.emitted]
        ends = [at + 1 for at, token in enumerate(written) if token in set(stops)]
        return self.cut(min([len(written), *ends[:1], *([] if most is None else [most])]))

    def tokens(self) -> set[int]:
        """Return every token that occurs, written or only drafted."""
        return {token for step in self.steps for token in (*step.tokens, *step.emitted)}

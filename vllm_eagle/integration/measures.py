"""What the runner measures in a step: it travels to the scheduler with the step's output, and from there to the metrics."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

DRAFT, VERIFY, COMMIT = PARTS = ("draft", "verify", "commit")

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Measures:
    """Hold the sizes and seconds of one step."""

    drafted: list[int]
    """Nodes of each tree grown in this step; it is verified in the next one, or never."""
    depths: dict[str, int]
    """Levels of each tree verified in this step, by request."""
    seconds: dict[str, float]
    """Wall time of the step's parts, those that took place."""
    seen: list[tuple[str, int, float]] = field(default_factory=list)
    """What the costs of steps are learnt from, where several ranks have to learn the same (`parallel.py`)."""


def timed(part: str) -> Callable[[Method], Method]:
    """Add a method's wall time to `self.seconds[part]`."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

        return run  # type: ignore[return-value]

    return wrap

"""One line of progress that rewrites itself on a terminal and is sparse in a log file."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO


@dataclass
class Progress:
    """Show how much of `total` rows is done, tokens a second of this run if any are counted, and the time left."""

    label: str
    total: int
    done: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    tokens: int = field(default=0, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _shown: float = field(default=0.0, init=False)
    _skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._skipped = self.done

    def add(self, tokens: int, rows: int = 1, note: str = "") -> None:
        """Count finished rows and their tokens; redraw at most once a second (terminal) or ten seconds (file)."""
        self.done += rows
        self.tokens += tokens
        now = time.monotonic()
        if now - self._shown >= (1 if self.stream.isatty() else 10) or self.done >= self.total:
            self._shown = now
            self._draw(now - self._began, note)

    def _draw(self, elapsed: float, note: str) -> None:
        fresh = max(1, self.done - self._skipped)
        left = elapsed / fresh * (self.total - self.done)
        share = self.done / max(1, self.total)
        bar = "#" * int(20 * share)
        end = "\x1b[K\r" if self.stream.isatty() and self.done < self.total else "\n"
        rate = f" · {self.tokens / max(elapsed, 1e-9):.0f} tokens/s" if self.tokens else ""
        line = f"{self.label} [{bar:<20}] {self.done}/{self.total}{rate} · {_clock(left)} left{note}"
        print(line, end=end, file=self.stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"

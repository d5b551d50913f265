"""What was found, and what to do about it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """Say how bad it is."""

    GOOD = "ok"
    NOTE = "note"
    """Works, and could be better."""
    BAD = "fail"
    """Serving will not work."""


_COLOUR = {Level.GOOD: "32", Level.NOTE: "33", Level.BAD: "31"}


@dataclass(frozen=True)
class Finding:
    """Hold one line of the report, and one of advice where there is something to do."""

    level: Level
    what: str
    advice: str = ""

    def __str__(self) -> str:
        word = f"{self.level.value:>5}"
        if sys.stdout.isatty():
            word = f"\033[{_COLOUR[self.level]}m{word}\033[0m"
        return f"{word}  {self.what}" + (f"\n       → {self.advice}" if self.advice else "")


def good(what: str) -> Finding:
    """Say that something is as it should be."""
    return Finding(Level.GOOD, what)


def note(what: str, advice: str) -> Finding:
    """Say that something could be better."""
    return Finding(Level.NOTE, what, advice)


def bad(what: str, advice: str) -> Finding:
    """Say what keeps serving from working."""
    return Finding(Level.BAD, what, advice)

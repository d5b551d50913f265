"""Rows of a batch job: what may stand in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_eagle.errors import EagleError

_OWN = ("id", "prompt", "messages")


class BadRow(ValueError):
    """Say what is wrong with one row; the others go on."""


@dataclass(frozen=True)
class Row:
    """Hold one request: text or messages, and sampling parameters by vLLM's names."""

    index: int
    """Line of the input, from 0."""
    id: Any
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    parameters: dict[str, Any]


def parse(index: int, line: bytes) -> Row:
    """Read one line; raises `BadRow`."""
    try:
        found = json.loads(line)
    except ValueError as wrong:
        raise BadRow(f"not valid JSON ({wrong})") from None
    if not isinstance(found, dict):
        raise BadRow(f"want an object with prompt or messages, not {type(found).__name__}")
    prompt, messages = found.get("prompt"), found.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRow("want prompt or messages, one of the two")
    tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if prompt is not None and not isinstance(prompt, str) and not tokens:
        raise BadRow("prompt: want a string, or a list of token ids")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(one, dict) for one in messages)):
        raise BadRow("messages: want a list of objects with role and content")
    parameters = {name: value for name, value in found.items() if name not in _OWN}
    return Row(index, found.get("id"), prompt, messages, parameters)


def name(line: bytes) -> Any:
    """Return the id of a row that may be wrong in other ways, None if it has none."""
    try:
        return json.loads(line).get("id")
    except (ValueError, AttributeError):
        return None


def count(path: Path) -> int:
    """Count the rows of a file; raises `EagleError` if it cannot be read, or is empty."""
    try:
        with path.open("rb") as file:
            rows = sum(1 for line in file if line.strip())
    except OSError as wrong:
        raise EagleError(f"{path} cannot be read ({wrong.strerror})") from None
    if rows == 0:
        raise EagleError(f"{path} is empty; want a JSON object with prompt or messages in each line")
    return rows


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each row's index and line; blank lines are no rows."""
    with path.open("rb") as file:
        yield from enumerate(line for line in file if line.strip())

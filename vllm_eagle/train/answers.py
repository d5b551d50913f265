"""Answers written by the target, in append-only shards that survive a kill and are never written twice.

answers-00000.jsonl   one JSON object a line: id, prompt_ids, out_ids, temperature
answers-00001.jsonl   every run opens a new shard, so a line torn by a kill stays alone and is skipped on reading
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_eagle.errors import EagleError


@dataclass(frozen=True)
class Question:
    """Hold a tokenised prompt and how to answer it; `id` is unique within a data set."""

    id: str
    prompt_ids: tuple[int, ...]
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """Hold one sequence of the target: the answer span is `out_ids`, everything before it is given."""

    id: str
    prompt_ids: tuple[int, ...]
    out_ids: tuple[int, ...]
    temperature: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.out_ids

    def fingerprint(self) -> str:
        """Return a key equal for equal sequences, whatever their `id`."""
        return hashlib.sha1(repr(self.token_ids).encode()).hexdigest()

    def to_json(self) -> str:
        row = {"id": self.id, "temperature": self.temperature, "prompt_ids": self.prompt_ids, "out_ids": self.out_ids}
        return json.dumps(row, separators=(",", ":"))


@dataclass
class ReadReport:
    """Count what reading left out, and why."""

    torn: int = 0
    empty: int = 0
    repeated: int = 0

    def __str__(self) -> str:
        return f"skipped: {self.torn} unreadable lines, {self.empty} without an answer, {self.repeated} repeated"


def read_answers(source: Path, report: ReadReport | None = None) -> Iterator[Answer]:
    """Yield each distinct answer of a `.jsonl` or `.jsonl.xz` file, or of all shards of a folder in order.

    Torn lines, rows without an answer and repeated sequences are skipped and counted in `report`.
    """
    report = report if report is not None else ReadReport()
    seen: set[str] = set()
    for answer in _rows(source, report):
        if not answer.out_ids or not answer.prompt_ids:
            report.empty += 1
        elif (key := answer.fingerprint()) in seen:
            report.repeated += 1
        else:
            seen.add(key)
            yield answer


def answered_ids(folder: Path) -> set[str]:
    """Return the `id` of every row under `folder`, repeated ones included; empty when there is no folder yet."""
    return {answer.id for answer in _rows(folder, ReadReport())} if folder.is_dir() else set()


def read_all(sources: Iterable[Path]) -> tuple[list[Answer], ReadReport]:
    """Read several files or folders as one data set without repetitions."""
    report, seen, answers = ReadReport(), set[str](), list[Answer]()
    for source in sources:
        for answer in read_answers(source, report):
            if (key := answer.fingerprint()) in seen:
                report.repeated += 1
                continue
            seen.add(key)
            answers.append(answer)
    return answers, report


def _rows(source: Path, report: ReadReport) -> Iterator[Answer]:
    for path in _shards(source):
        raw = path.read_bytes()
        for line in (lzma.decompress(raw) if path.suffix == ".xz" else raw).splitlines():
            answer = _parse(line)
            if answer is None:
                report.torn += 1
            else:
                yield answer


def _shards(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise EagleError(f"no answers at {source}; run the generate step first, or give its output folder")
    return sorted(source.glob("answers-*.jsonl"))


def _parse(line: bytes) -> Answer | None:
    try:
        row: dict[str, Any] = json.loads(line)
        prompt, out = tuple(map(int, row["prompt_ids"])), tuple(map(int, row["out_ids"]))
    except (ValueError, KeyError, TypeError):
        return None
    name = row.get("id") or "q" + hashlib.sha1(repr(prompt).encode()).hexdigest()[:11]
    return Answer(str(name), prompt, out, float(row.get("temperature") or 0.0))


@dataclass
class AnswerWriter:
    """Append answers to numbered shards of `rows_per_shard` rows; each row is on disk before the next is made."""

    folder: Path
    rows_per_shard: int = 512
    _rows: int = field(default=0, init=False)
    _descriptor: int = field(default=-1, init=False)

    def write(self, answer: Answer) -> None:
        """Append one row in one system call; raises `EagleError` when the disk is full (earlier rows stay whole)."""
        try:
            if self._descriptor < 0 or self._rows % self.rows_per_shard == 0:
                self._open_next()
            line = answer.to_json().encode() + b"\n"
            if os.write(self._descriptor, line) != len(line):
                raise OSError("short write")
        except OSError as bad:
            raise EagleError(f"{self.folder}: cannot write ({bad}); free some space and run again, it resumes") from None
        self._rows += 1

    def close(self) -> None:
        """Flush to disk; safe to call twice."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_next(self) -> None:
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        last = max((int(path.stem.split("-")[1]) for path in self.folder.glob("answers-*.jsonl")), default=-1)
        path = self.folder / f"answers-{last + 1:05d}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

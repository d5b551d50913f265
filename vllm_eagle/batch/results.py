"""Results on their way to disk: appended as they come, put in order at the end.

    OUT.part    first line: what job this is; then one line for each answered row, in the order they ended
    OUT         the same lines in the rows' order, once all are there

A kill costs the rows that were being answered, and half a line at most.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from vllm_eagle.errors import EagleError


def fingerprint(source: Path, flags: list[str]) -> dict[str, Any]:
    """Name a job by its rows and the engine's flags, so that no two are mixed."""
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"rows": digest.hexdigest(), "flags": flags}


class Results:
    """Hold the answered rows of one job."""

    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        """Open or continue; raises `EagleError` for another job's results, or a place that cannot be written."""
        self._out, self._part = out, out.with_name(out.name + ".part")
        if out.exists():
            raise EagleError(f"{out} is there already; remove it, or name another file")
        self.places: dict[int, tuple[int, int]] = {}  # of each row's line in the part: offset, length
        try:
            self._file: BinaryIO = self._part.open("r+b" if self._part.exists() else "w+b")
        except OSError as wrong:
            raise EagleError(f"{self._part} cannot be written ({wrong.strerror})") from None
        self._end = self._read(job)
        self._file.truncate(self._end)
        if self._end == 0:
            self._append({"job": job})

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, index: int, result: dict[str, Any]) -> None:
        """Keep one row's result; it is on its way to disk when this returns."""
        begin = self._end
        self._append({"index": index, **result})
        self.places[index] = begin, self._end - begin

    def finish(self, rows: int) -> None:
        """Write the rows in order under their final name; raises `EagleError` if some are missing."""
        if missing := rows - len(self.places):
            raise EagleError(f"{missing} of {rows} rows have no result yet; run the same command again")
        scratch = self._out.with_name(self._out.name + ".sorting")
        with scratch.open("wb") as file:
            for index in range(rows):
                offset, length = self.places[index]
                self._file.seek(offset)
                file.write(self._file.read(length))
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._out)
        self._part.unlink()

    def _append(self, value: dict[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        self._file.seek(self._end)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as wrong:
            raise EagleError(f"{self._part} cannot be written ({wrong.strerror}); what is there stays, run again") from None
        self._end += len(line)

    def _read(self, job: dict[str, Any]) -> int:
        """Take in what an earlier run left; return where its last whole line ends."""
        end = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            found = json.loads(line)
            if number == 0 and found.get("job") != job:
                raise EagleError(
                    f"{self._part} holds results of another job (other rows or other flags); remove it, or name another file"
                )
            if number > 0:
                self.places[int(found["index"])] = end, len(line)
            end += len(line)
        return end

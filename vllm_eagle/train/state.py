"""A fit's state on disk: complete or absent, and enough to continue as if it had never stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vllm_eagle.errors import EagleError
from vllm_eagle.train.curves import curves

Record = dict[str, float]


def save_state(folder: Path, head: nn.Module, optimizer: Optimizer, step: int, identity: str) -> None:
    """Write weights, optimizer state and step under a temporary name, then rename.

    Data order and noise follow from seed and step, so `step` is all the randomness there is to keep.
    """
    state = {
        "identity": identity,
        "step": step,
        "head": head.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "state.tmp"
    try:
        torch.save(state, half)
        os.replace(half, folder / "state.pt")
    except (OSError, RuntimeError) as bad:
        half.unlink(missing_ok=True)
        raise EagleError(f"{folder}: cannot write ({bad}); free some space and run again, it resumes") from None


def load_state(folder: Path, head: nn.Module, optimizer: Optimizer, identity: str) -> int:
    """Restore a saved fit in place and return its step, 0 when there is none.

    Raises `EagleError` when the state belongs to other settings or other data: continuing would be neither of the two.
    """
    path = folder / "state.pt"
    if not path.is_file():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as bad:
        reason = str(bad).splitlines()[0] if str(bad) else type(bad).__name__
        raise EagleError(f"{path} cannot be read ({reason}); remove it to begin again") from None
    if state["identity"] != identity:
        raise EagleError(
            f"{path} is of another fit ({state['identity']}); this one is {identity}. Give a new --out, "
            f"and --start to begin from an exported head"
        )
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def mean_record(records: Sequence[Record]) -> Record:
    """Return the mean of every figure over the batches that have it: a batch whose rounds all ended has no deeper ones."""
    names = dict.fromkeys(name for record in records for name in record)
    found = {name: [record[name] for record in records if name in record] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


@dataclass
class Journal:
    """Append a line for each group of steps to `journal.jsonl`, and to a TensorBoard `board` if there is one."""

    folder: Path
    board: Any = None
    every: int = 20
    _sums: Record = field(default_factory=dict, init=False)
    _count: int = field(default=0, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)

    def record(self, step: int, record: Record) -> None:
        """Add one step's figures; every `every` steps their means and the speed are written and shown."""
        for name, value in record.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        if (step + 1) % self.every:
            return
        line = {name: round(total / self._count, 4) for name, total in self._sums.items()}
        line["rounds_per_s"] = round(self._sums["rounds"] / (time.monotonic() - self._began))
        self.note({"step": step + 1, **line})
        self._sums, self._count, self._began = {}, 0, time.monotonic()

    def note(self, line: dict[str, object]) -> None:
        """Append one line as it is."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "journal.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as bad:
            raise EagleError(f"{self.folder}: cannot write ({bad}); free some space and run again, it resumes") from None
        print(" ".join(f"{name} {value}" for name, value in line.items()), flush=True)
        if self.board is not None:
            for name, value in curves(line).items():
                self.board.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write what the board still holds."""
        if self.board is not None:
            self.board.close()

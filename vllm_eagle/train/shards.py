"""Captured answers on their way to disk: gathered, checked, and written a shard at a time by whoever captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Answer
from vllm_eagle.train.features import Example, captured_keys, captured_layers, shard_paths, write_shard

CANDIDATES = 16
"""Best tokens kept after each feature that guides an answer."""
CHECK_EVERY = 10
"""Of so many answers one has its stored features put to the LM head again: evidence enough."""


@dataclass(frozen=True)
class Captured:
    """Hold what was captured for one answer, and how many of its argmaxes were checked and reproduced."""

    example: Example
    aux: Tensor | None = None  # [T-1, A*D] float16, where auxiliary layers are captured
    checked: int = 0
    reproduced: int = 0


@dataclass
class CaptureReport:
    """Count what was captured and how often the stored features give the target's own best token."""

    tokens: int = 0
    too_long: int = 0
    foreign: int = 0
    checked: int = 0
    reproduced: int = 0

    @property
    def holds(self) -> bool:
        """Tell whether the argmax was reproduced on 99.9 %; two misses are let pass, as a few answers may hold near ties."""
        return self.checked - self.reproduced <= max(2, 0.001 * self.checked)

    def __str__(self) -> str:
        skipped = f"skipped: {self.too_long} too long, {self.foreign} with tokens outside the vocabulary"
        if not self.checked:
            return f"{self.tokens} answer tokens captured; {skipped}"
        share = 100 * self.reproduced / self.checked
        return (
            f"{self.tokens} answer tokens captured; stored features give the target's argmax on {share:.2f} % of "
            f"{self.checked}; {skipped}"
        )


class ShardWriter:
    """Write captured answers into `folder`, each once over any number of runs.

    Raises `EagleError` where the folder holds states of other layers than `aux_layers`.
    """

    def __init__(self, folder: Path, aux_layers: Sequence[int] = (), rows_per_shard: int = 64) -> None:
        self.report = CaptureReport()
        self._folder, self._aux_layers, self._rows_per_shard = folder, tuple(aux_layers), rows_per_shard
        self._keys = captured_keys(folder)
        self._waiting: list[tuple[Answer, Captured]] = []
        if (held := captured_layers(folder)) not in (None, self._aux_layers):
            raise EagleError(
                f"{folder} holds states of layers {held or '(none)'}, this capture adds {self._aux_layers or '(none)'}; "
                f"use the same --aux-layers or another folder"
            )

    def __contains__(self, answer: Answer) -> bool:
        return answer.fingerprint() in self._keys

    def add(self, answer: Answer, captured: Captured) -> None:
        """Take one answer unless an equal one is there; raises `EagleError` where a shard's features fail the argmax check."""
        if answer in self or not answer.out_ids:
            return
        self._keys.add(answer.fingerprint())
        self._waiting.append((answer, captured))
        self.report.tokens += len(answer.out_ids)
        self.report.checked += captured.checked
        self.report.reproduced += captured.reproduced
        if len(self._waiting) == self._rows_per_shard:
            self.close()

    def close(self) -> None:
        """Write what is left in a shard of its own; safe to call twice."""
        if not self._waiting:
            return
        group, self._waiting = self._waiting, []
        number = max((int(path.stem.split("-")[1]) for path in shard_paths(self._folder)), default=-1) + 1
        path = self._folder / f"features-{number:05d}.safetensors"
        if not self.report.holds:
            raise EagleError(f"{path} not written: {self.report}; the features are not what the LM head reads")
        self._folder.mkdir(parents=True, exist_ok=True)
        examples = [captured.example for _, captured in group]
        aux = [captured.aux for _, captured in group if captured.aux is not None]
        write_shard(path, [answer for answer, _ in group], examples, aux, self._aux_layers)

"""The walk on a device: tensors of fixed shapes, a fixed number of levels, and nothing that waits for the device.

The rule is `walk`'s. A request that has stopped goes on through the remaining levels with the row `STOPPED`; what it draws
there is not used.

Shapes: `R` requests, `N` rows of the widest tree allowed, `W` levels: tokens emitted by the luckiest request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_eagle.tree import DraftTree
from vllm_eagle.verify.walk import STOPPED

NO_ROW = -2
"""Parent of a row that is not there: no row, and not `STOPPED`."""


class SampleOnDevice(Protocol):
    """Sample one token per request."""

    def __call__(self, level: int, rows: Tensor) -> Tensor:
        """Return tokens [R] int64 drawn from the logits of tree rows [R]; where a row is `STOPPED` any token will do."""
        ...


@dataclass(frozen=True)
class DeviceWalk:
    """What came of a walk, `STOPPED` behind the end of each row."""

    emitted: Tensor  # [R, W] tokens in order
    paths: Tensor  # [R, W - 1] accepted tree rows in order, the root not counted


def tree_table(trees: Sequence[DraftTree | None], rows: int) -> Tensor:
    """Lay out trees as one host tensor [2, R, N] int32 of tokens and parents, `rows` wide: one copy to the device."""
    table = np.full((2, len(trees), rows), NO_ROW, np.int32)
    for r, tree in enumerate(trees):
        if tree is not None:
            table[0, r, : len(tree.tokens)], table[1, r, : len(tree.parents)] = tree.tokens, tree.parents
    return torch.from_numpy(table)


def walk_on_device(table: Tensor, taking_part: Tensor, sample: SampleOnDevice, levels: int) -> DeviceWalk:
    """Walk all trees of a `tree_table` [2, R, N] together; `levels` is one more than the deepest tree's depth."""
    tokens, parents = table[0], table[1]
    rows = torch.where(taking_part, 0, STOPPED)
    emitted, paths = [], [rows.new_empty(len(rows), 0)]
    for level in range(levels):
        drawn = sample(level, rows)
        emitted.append(torch.where(rows == STOPPED, STOPPED, drawn))
        match = (parents == rows[:, None]) & (tokens == drawn[:, None]) & (rows != STOPPED)[:, None]
        rows = torch.where(match.any(1), match.int().argmax(1), STOPPED)  # siblings carry distinct tokens: one match at most
        if level + 1 < levels:
            paths.append(rows[:, None])
    return DeviceWalk(torch.stack(emitted, dim=1), torch.cat(paths, dim=1))


def greedy(best: Tensor, first_rows: Tensor) -> SampleOnDevice:
    """Return a sampler that knows the best token of every row: `best` [rows of all trees], the roots at `first_rows` [R]."""
    return lambda level, rows: best[first_rows + rows.clamp(min=0)]


def accepted_places(paths: Tensor, first_row: Tensor, starts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the accepted rows' K/V comes from and goes to: rows [A] among the kept, -1 for none; slots [groups, A].

    `first_row` [R]: each root's row among the kept; `starts` [R]: its batch row; `slots` [groups, T]: slots of consecutive
    positions, batch row by batch row, as plain decoding would write. A = R * (W - 1), whatever was accepted.
    """
    accepted = paths != STOPPED
    source = torch.where(accepted, first_row[:, None] + paths, -1)
    behind = starts[:, None] + 1 + torch.arange(paths.shape[1], device=paths.device)
    target = torch.where(accepted, slots[:, behind.clamp(max=slots.shape[1] - 1)], -1)  # [groups, R, W - 1]
    return source.flatten(), target.flatten(1)

"""What one step of the runner carries from its inputs to its drafts.

    before the forward   rows of the trees get their depth positions and slot -1; their true slots are kept here
    after the walk       the accepted rows' K/V goes to consecutive slots, right behind the root
    drafting             the newly certain positions are the prefill rows, or the root and the accepted rows

Shapes: `R` requests of the batch, `T` batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_eagle.tree import DraftTree, TreeRows
from vllm_eagle.verify import Walk

_ROOT = DraftTree.build([0], [-1])


@dataclass
class Step:
    """Hold the trees of a batch and where their rows lie."""

    trees: list[DraftTree | None]  # [R] None: nothing drafted
    starts: NDArray[np.int32]  # [R] first batch row
    counts: NDArray[np.int32]  # [R] batch rows
    computed: NDArray[np.int32]  # [R] tokens in the cache before this step
    slots: dict[int, Tensor]  # per K/V cache group: slots [T] of consecutive positions, as plain decoding would write
    walk: Walk | None = None
    owners: list[int] = field(init=False)  # requests that have a tree
    laid: dict[int, DraftTree] = field(init=False)
    """What tree attention gets if there are trees: they, and every other request of one row as a tree without nodes.

    Two kinds of attention in one step cost more than their rows: gathers, a scatter and another operator in every layer.
    """

    def __post_init__(self) -> None:
        self.owners = [r for r, tree in enumerate(self.trees) if tree is not None]
        own = {r: tree or _ROOT for r, tree in enumerate(self.trees) if tree is not None or self.counts[r] == 1}
        self.laid = own if self.owners else {}

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return batch rows and positions of all tree rows: a node stands at its depth behind the root."""
        rows = [self.starts[r] + np.arange(len(tree.tokens)) for r, tree in self.laid.items()]
        places = [self.computed[r] + tree.depths for r, tree in self.laid.items()]
        return torch.from_numpy(np.concatenate(rows)).long(), torch.from_numpy(np.concatenate(places)).long()

    def node_rows(self) -> Tensor:
        """Return batch rows of the drafted nodes: all tree rows but the roots."""
        rows = [self.starts[r] + np.arange(1, len(tree.tokens)) for r, tree in self.laid.items()]
        return torch.from_numpy(np.concatenate(rows)).long()

    def tree_rows(self, block_table: Tensor) -> TreeRows:
        """Lay out the trees over the blocks [R, B] of a K/V cache group."""
        laid = list(self.laid)
        starts, computed = (torch.from_numpy(x[laid]).int() for x in (self.starts, self.computed))
        return TreeRows.of_trees(list(self.laid.values()), starts, computed, block_table[torch.tensor(laid)].contiguous())

    def others(self) -> list[int]:
        """Return the requests that vLLM's own attention serves."""
        return [r for r in range(len(self.trees)) if r not in self.laid]

    def accepted(self) -> tuple[Tensor, Tensor]:
        """Return the accepted nodes: their index among the tree rows, and the batch rows whose slots they take."""
        assert self.walk is not None
        source, target, first = [], [], 0
        for r, tree in self.laid.items():
            path = self.walk.paths[r]
            source += [first + row for row in path]
            target += [int(self.starts[r]) + 1 + i for i in range(len(path))]
            first += len(tree.tokens)
        return torch.tensor(source, dtype=torch.long), torch.tensor(target, dtype=torch.long)

    def known(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Return batch rows [K] whose features became certain, their positions [K], and counts [R]."""
        assert self.walk is not None
        rows, positions, counts = [], [], []
        for r, tree in enumerate(self.trees):
            start = int(self.starts[r])
            mine = [start, *(start + row for row in self.walk.paths[r])] if tree else range(start, start + int(self.counts[r]))
            rows.extend(mine)
            positions.extend(range(int(self.computed[r]), int(self.computed[r]) + len(mine)))
            counts.append(len(mine))
        return np.array(rows, np.int64), np.array(positions, np.int64), np.array(counts, np.int32)

"""How often a draft of the head's probability p is really accepted, once its parent is: learned while serving, level by level.

Shapes: `n` nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_eagle.tree import DraftTree

EDGES = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
"""Borders of the bins of p."""
PRIOR = 8.0
"""Observations that the head's own word is worth: in a bin, where it is scaled to what the level has shown, and in a level."""
MEMORY = 2000.0
"""Observations after which a bin forgets half: texts change."""


class Calibration:
    """Count, per level and bin of the head's conditional probability, how many nodes were tried and how many accepted."""

    def __init__(self, levels: int) -> None:
        shape = (levels, len(EDGES) + 1)
        self._tried, self._accepted, self._claimed = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._stood, self._left = np.zeros(levels), np.zeros(levels)  # at a node with children; on to one of them

    def __call__(self, probabilities: NDArray[np.float32], level: int) -> NDArray[np.float32]:
        """Return the acceptance expected [n] of nodes of `level` (0: children of the root), whose parent is accepted."""
        bins = np.digitize(probabilities, EDGES)
        tried, accepted = self._tried[level][bins], self._accepted[level][bins]
        trust = min(1.0, (self._accepted[level].sum() + PRIOR) / (self._claimed[level].sum() + PRIOR))
        expected: NDArray[np.float64] = (accepted + PRIOR * trust * probabilities) / (tried + PRIOR)
        return expected.astype(np.float32)

    def observe(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Take a verified tree with its guesses, and the rows accepted in order."""
        assert tree.guesses is not None
        walked = np.array([0, *path])
        rows = np.flatnonzero(np.isin(tree.parents, walked))  # whose parent was accepted
        levels, guesses = tree.depths[rows] - 1, tree.guesses[rows]
        where = (levels, np.digitize(guesses, EDGES))
        np.add.at(self._tried, where, 1.0)
        np.add.at(self._accepted, where, np.isin(rows, walked))
        np.add.at(self._claimed, where, guesses)
        full = self._tried > MEMORY
        for counts in (self._tried, self._accepted, self._claimed):
            counts[full] /= 2
        self._stood[np.unique(levels)] += 1
        self._left[: len(path)] += 1

    def hits(self, level: int) -> float:
        """Return how often one of the children at `level` was accepted, where their parent was."""
        return float((self._left[level] + 1.0) / (self._stood[level] + 2.0))

    def error(self) -> NDArray[np.float64]:
        """Return the expected calibration error of the head's own probabilities by level: mean |claimed - accepted|."""
        tried = self._tried.sum(1)
        gaps = np.abs(self._claimed - self._accepted).sum(1)
        error: NDArray[np.float64] = np.divide(gaps, tried, out=np.zeros_like(gaps), where=tried > 0)
        return error

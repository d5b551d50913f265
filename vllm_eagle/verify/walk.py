"""Verify trees by walking them with the engine's own sampler.

At the root, sample the target's next token exactly as plain decoding would. It is emitted. If the tree has it as a
child of where we stand, step there and sample again from that node's logits; else stop. Every emitted token is drawn
by the code and from the logits of plain decoding, so the draft decides only how many are emitted, never which.

Shapes: `R` requests, `N` rows of the widest tree, `W` tokens emitted by the luckiest request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_eagle.tree import DraftTree

STOPPED = -1


class SampleLevel(Protocol):
    """Sample one token per request."""

    def __call__(self, rows: NDArray[np.int64], emitted: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return tokens [R] drawn from the logits of tree row `rows` [R], given the tokens this walk emitted so far.

        Where `rows` is `STOPPED` the request takes no part: its random state must not move, its token is ignored.
        """
        ...


@dataclass(frozen=True)
class Walk:
    """What came of a walk."""

    emitted: list[list[int]]  # [R] tokens in order, at least one for every request that took part
    paths: list[list[int]]  # [R] accepted tree rows in order, the root not counted: one fewer than emitted


def walk(trees: Sequence[DraftTree | None], taking_part: Sequence[bool], sample: SampleLevel) -> Walk:
    """Walk all trees together, one call of `sample` per level; a request without a tree samples once and stops."""
    emitted: list[list[int]] = [[] for _ in trees]
    paths: list[list[int]] = [[] for _ in trees]
    children = _Children(trees)
    rows = np.where(np.asarray(taking_part, bool), 0, STOPPED).astype(np.int64)
    while (rows != STOPPED).any():
        tokens = sample(rows, emitted)
        following = children.find(rows, tokens)
        for r in np.flatnonzero(rows != STOPPED):
            emitted[r].append(int(tokens[r]))
            if following[r] != STOPPED:
                paths[r].append(int(following[r]))
        rows = following
    return Walk(emitted, paths)


def walk_greedy(trees: Sequence[DraftTree | None], taking_part: Sequence[bool], best: Sequence[NDArray[np.int64]]) -> Walk:
    """Walk with the best token of every row known beforehand: `best` [R][rows of the tree]."""
    width = max(len(row) for row in best)
    table = np.stack([np.pad(row, (0, width - len(row))) for row in best])

    def pick(rows: NDArray[np.int64], emitted: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        return np.take_along_axis(table, np.maximum(rows, 0)[:, None], 1)[:, 0]

    return walk(trees, taking_part, pick)


def retrace(trees: Sequence[DraftTree | None], tokens: Sequence[Sequence[int]]) -> Walk:
    """Return the walk that emitted `tokens` [R], where they alone came back; a request without any took no part."""

    def told(rows: NDArray[np.int64], emitted: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        return np.array([mine[len(past)] if len(past) < len(mine) else -1 for mine, past in zip(tokens, emitted, strict=True)])

    return walk(trees, [bool(mine) for mine in tokens], told)


class _Children:
    """Find the child of a row that carries a token, in all trees at once."""

    def __init__(self, trees: Sequence[DraftTree | None]) -> None:
        width = max((len(tree.tokens) for tree in trees if tree is not None), default=1)
        self._tokens = np.full((len(trees), width), STOPPED, np.int64)
        self._parents = np.full((len(trees), width), STOPPED, np.int64)
        for r, tree in enumerate(trees):
            if tree is not None:
                self._tokens[r, : len(tree.tokens)] = tree.tokens
                self._parents[r, : len(tree.parents)] = tree.parents

    def find(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the matching child's row [R], `STOPPED` where there is none."""
        match = (self._parents == rows[:, None]) & (self._tokens == tokens[:, None])
        match[:, 0] = False  # the root is nobody's child
        match[rows == STOPPED] = False
        return np.where(match.any(1), match.argmax(1), STOPPED)

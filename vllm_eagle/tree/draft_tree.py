"""The draft tree of one request.

    row      0      1    2    3    4        parents   -1  0  0  1  1
    token   root    a    b    aa   ab       depths     0  1  1  2  2
                                            words      1  3  5 11 19   (bit j: row j is me or an ancestor)

The root is the last token already certain. Parents stand before children, so the first n rows are a tree too:
whoever is short of room cuts the tail. `N` rows, the root included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_eagle.errors import TreeError

MAX_NODES = 63
"""Most drafted nodes of one tree: a row's ancestors and the root fill one 64-bit word."""


@dataclass(frozen=True)
class DraftTree:
    """Hold one request's tree as flat arrays, parents before children, root at 0."""

    tokens: NDArray[np.int32]  # [N]
    parents: NDArray[np.int32]  # [N], -1 for the root
    depths: NDArray[np.int32]  # [N], 0 for the root
    words: NDArray[np.int64]  # [N], bit j set: row j is the row itself or an ancestor
    guesses: NDArray[np.float32] | None = None  # [N], the drafter's probability of each row after its parent, if it has one

    @classmethod
    def build(cls, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """Derive depths and ancestor words from tokens [N] and parents [N]; raises `TreeError` if it is no tree."""
        count = len(tokens)
        if count != len(parents) or count == 0:
            raise TreeError(f"a tree of {count} tokens needs as many parents, not {len(parents)}")
        if count - 1 > MAX_NODES:
            raise TreeError(f"a tree of {count - 1} nodes is over the limit of {MAX_NODES}")
        if parents[0] != -1:
            raise TreeError(f"row 0 is the root and has parent -1, not {parents[0]}")
        depths, words = np.zeros(count, np.int32), np.ones(count, np.int64)
        for row in range(1, count):
            parent = parents[row]
            if not 0 <= parent < row:
                raise TreeError(f"row {row} has parent {parent}; parents stand before their children")
            depths[row] = depths[parent] + 1
            words[row] = words[parent] | np.int64(1) << np.int64(row)
        tree = cls(np.asarray(tokens, np.int32), np.asarray(parents, np.int32), depths, words)
        tree.validate()
        return tree

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int]) -> DraftTree:
        """Return the tree in which every token is the only child of the one before it."""
        return cls.build([root, *tokens], range(-1, len(tokens)))

    @property
    def size(self) -> int:
        """Count the drafted nodes, the root not counted."""
        return len(self.tokens) - 1

    @property
    def nodes(self) -> list[int]:
        """List the node tokens in row order, as they travel to the scheduler."""
        return self.tokens[1:].tolist()  # type: ignore[no-any-return]

    def prefix(self, nodes: int) -> DraftTree:
        """Return the tree of the first `nodes` nodes; whatever was cut is simply not drafted."""
        if nodes >= self.size:
            return self
        end = nodes + 1
        guesses = None if self.guesses is None else self.guesses[:end]
        return DraftTree(self.tokens[:end], self.parents[:end], self.depths[:end], self.words[:end], guesses)

    def subset(self, rows: Sequence[int]) -> DraftTree:
        """Return the tree of some rows, ascending and with all their ancestors; raises `TreeError` if one is missing."""
        place = {row: i for i, row in enumerate(rows)} | {-1: -1}
        tree = DraftTree.build([int(self.tokens[row]) for row in rows], [place.get(int(self.parents[row]), -2) for row in rows])
        return tree if self.guesses is None else dataclasses.replace(tree, guesses=self.guesses[np.asarray(rows)])

    def children(self) -> list[list[int]]:
        """Return each row's children [N], in row order."""
        found: list[list[int]] = [[] for _ in self.tokens]
        for row in range(1, len(self.tokens)):
            found[self.parents[row]].append(row)
        return found

    def validate(self) -> None:
        """Check every invariant; raises `TreeError` naming the first row that breaks one."""
        seen: set[tuple[int, int]] = set()
        for row in range(1, len(self.tokens)):
            parent, token = int(self.parents[row]), int(self.tokens[row])
            if not 0 <= parent < row:
                raise TreeError(f"row {row} has parent {parent}; parents stand before their children")
            if self.depths[row] != self.depths[parent] + 1:
                raise TreeError(f"row {row} has depth {self.depths[row]}, its parent {self.depths[parent]}")
            if self.words[row] != self.words[parent] | (np.int64(1) << np.int64(row)):
                raise TreeError(f"row {row}: its ancestor word is not its parent's plus itself")
            if (parent, token) in seen:
                raise TreeError(f"token {token} is twice a child of row {parent}; siblings carry distinct tokens")
            seen.add((parent, token))

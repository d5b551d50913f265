"""Drafters that know the answer: they reach the code that a random head never reaches.

Each is given the texts plain decoding writes (prompt and continuation, token ids) and finds a request's text by what it
has written so far. A drafter given to them as `inner` still runs, so that the head's own K/V can be checked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_eagle.drafting import Drafter, HeadCache, Known
from vllm_eagle.errors import EagleError
from vllm_eagle.tree import DraftTree, Growth

Texts = Sequence[Sequence[int]]


class Oracle:
    """Put the right token at one sibling of every level: every tree is accepted to its full depth.

    A wrong sibling carries the right token as its child too: whoever follows tokens without parents is caught.
    """

    def __init__(
        self,
        inner: Drafter | None,
        growth: Growth,
        *,
        texts: str | Texts,
        depth: int,
        width: int,
        sibling: int,
        vocab: int = 256,
    ) -> None:
        """`texts`: JSON file of whole texts as token ids, or the lists themselves; `sibling` in 0..width-1."""
        if not 0 <= sibling < width:
            raise EagleError(f"sibling={sibling} is outside 0..{width - 1}")
        loaded = json.loads(Path(texts).read_text()) if isinstance(texts, str) else texts
        self.texts = [np.asarray(text, np.int32) for text in loaded]
        self.inner, self.depth, self.width, self.sibling, self.vocab = inner, depth, width, sibling, vocab
        if self.nodes > growth.size:
            raise EagleError(f"depth {depth} and width {width} make {self.nodes} nodes; set tree_size to that or more")

    @property
    def nodes(self) -> int:
        """Count the nodes of a full tree."""
        return self.depth * self.width + (self.depth - 1 if self.width > 1 else 0)

    def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
        """See `Drafter`."""
        if self.inner is not None:
            self.inner.draft(known, cache)
        return [self._tree(history).prefix(room) for history, room in zip(known.histories, known.rooms, strict=True)]

    def right(self, history: NDArray[np.int32]) -> list[int]:
        """Return what plain decoding writes next, at most `depth` tokens."""
        size = len(history)
        for text in self.texts:
            if len(text) > size and np.array_equal(text[:size], history):
                return text[size : size + self.depth].tolist()  # type: ignore[no-any-return]
        return []

    def _tree(self, history: NDArray[np.int32]) -> DraftTree:
        tokens, parents, parent, decoy = [int(history[-1])], [-1], 0, -1
        for level, right in enumerate(self._plan(self.right(history))):
            if decoy >= 0:
                tokens.append(right)
                parents.append(decoy)
            first = len(tokens)
            wrong = [(right + 1 + (level * self.width + j) % (self.vocab - 2)) % self.vocab for j in range(self.width - 1)]
            tokens += [*wrong[: self.sibling], right, *wrong[self.sibling :]]
            parents += [parent] * self.width
            parent = first + self.sibling
            decoy = -1 if self.width == 1 else first + (0 if self.sibling else 1)
        return DraftTree.build(tokens, parents)

    def _plan(self, right: list[int]) -> list[int]:
        return right


class Half(Oracle):
    """Be right down to `right_depth` and wrong below: exactly that many nodes are accepted."""

    def __init__(self, inner: Drafter | None, growth: Growth, *, right_depth: int | Sequence[int], **options: object) -> None:
        """`right_depth`: one for all, or a cycle chosen by the length of the text so far."""
        super().__init__(inner, growth, **options)  # type: ignore[arg-type]
        self.cycle = [right_depth] if isinstance(right_depth, int) else list(right_depth)

    def _tree(self, history: NDArray[np.int32]) -> DraftTree:
        self._now = self.cycle[len(history) % len(self.cycle)]
        return super()._tree(history)

    def _plan(self, right: list[int]) -> list[int]:
        return right[: self._now] + [(token + 1) % self.vocab for token in right[self._now :]]


class Hostile(Oracle):
    """Propose what must never slip through: given tokens (EOS, banned ones) first, then right tokens out of order."""

    def __init__(self, inner: Drafter | None, growth: Growth, *, tokens: Sequence[int], **options: object) -> None:
        """`tokens` are proposed at every level, before anything else."""
        super().__init__(inner, growth, sibling=0, **options)  # type: ignore[arg-type]
        self.tokens = list(tokens)

    def _tree(self, history: NDArray[np.int32]) -> DraftTree:
        tokens, parents, parent = [int(history[-1])], [-1], 0
        right = self.right(history)
        for level in range(self.depth):
            out_of_order = right[level + 1 :] + right[:level]
            children = list(dict.fromkeys(self.tokens + out_of_order))[: self.width]
            tokens += children
            parents += [parent] * len(children)
            parent = len(tokens) - 1
        return DraftTree.build(tokens, parents)

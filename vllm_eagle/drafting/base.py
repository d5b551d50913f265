"""The contract of a drafter, and what it is told each step.

Shapes: `R` requests of the batch, `T` newly computed positions of all requests, `D` hidden size.

    one request, computed up to position p-1 before this step, root and two nodes accepted:

    position      p        p+1      p+2                          p+3
    token         root     node     node                         just sampled (bonus)
    feature       f_p      f_p+1    f_p+2    <- target, this step
    next token    node     node     bonus    <- one ahead of the feature: the head's other input
    head K/V      p        p+1      p+2      <- written now, from target features only
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_eagle.drafting.noise import Draws
from vllm_eagle.tree import DraftTree, TreeRows


@dataclass(frozen=True)
class Known:
    """Say what this step made certain, request after request."""

    request_ids: Sequence[str]  # [R]
    features: Tensor  # [T, D] what the head reads of the target at the newly computed positions; for EAGLE-3 [T, 3D]
    next_tokens: Tensor  # [T] int64, the token one ahead of each
    positions: Tensor  # [T] int64, of the features
    lengths: Tensor  # [R] int32, on the host: how many of the T belong to each request, at least 1
    rooms: Sequence[int]  # [R] most nodes that may be drafted; 0 for a request that drafts nothing now
    histories: Sequence[NDArray[np.int32]]  # [R] all certain tokens of each request, the root last
    draws: Draws | None = None  # [R] how the target will draw; None when it takes the best token everywhere, or is not known

    @property
    def ends(self) -> Tensor:
        """Return the index of each request's last newly known position [R]."""
        return self.lengths.long().cumsum(0) - 1

    @property
    def roots(self) -> Tensor:
        """Return the last certain token of each request [R], where its tree hangs."""
        return self.next_tokens[self.ends]


class HeadCache(Protocol):
    """Keep the head's keys and values of certain positions, in the engine's paged cache."""

    def attend_known(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value [T, G, K] of the newly known positions and attend causally from query [T, H, K].

        In the last layer query is [R, H, K]: nobody reads the others' output.
        """
        ...

    def level_rows(self, drafting: Tensor, words: Tensor, key_stride: int) -> TreeRows:
        """Lay out one level behind all known positions of the requests `drafting` [R] (indices into the batch).

        `words` [R, F] count scratch K/V rows, `key_stride` of them for each request.
        """
        ...

    def attend_level(self, layer: int, query: Tensor, tree_key: Tensor, tree_value: Tensor, rows: TreeRows) -> Tensor:
        """Attend from query [R*F, H, K] to the known positions and the scratch K/V [R*S, G, K]."""
        ...


class Pricing(Protocol):
    """Decide what is worth drafting (`control/`); without one a drafter grows every tree to its full size."""

    def begin(self, positions: int) -> None:
        """Hear that a drafting starts whose first pass reads `positions`."""
        ...

    def calibrate(self, probabilities: NDArray[np.float32], level: int) -> NDArray[np.float32]:
        """Return the acceptance expected of nodes of `level` (0: the root's children), given the head's probabilities."""
        ...

    def deeper(self, level: int, values: NDArray[np.float32]) -> bool:
        """Decide whether to run the head over a frontier of values [R, F], nodes of `level` (1: the root's children)."""
        ...

    def choose(self, values: NDArray[np.float32], depths: NDArray[np.int32], others: int) -> list[int]:
        """Return how many nodes of each request to keep, from their values and depths [R, N]; `others` rows stand beside."""
        ...


class Drafter(Protocol):
    """Propose trees."""

    def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
        """Return one tree per request [R], of at most its room; a root alone drafts nothing."""
        ...

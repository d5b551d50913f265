"""The choice of every step: draft or not, one level more or not, and which nodes of all requests to verify.

With R requests, nodes of calibrated value V (the chance that they are accepted), T(B) seconds for B rows of the target, D for
drafting and C between steps, tokens per second are

    rate(n) = (R + sum of the n largest V) / (T(R + n) + D + C)

and plain decoding is rate(0) without D. Nodes are kept where rate(n) is largest; a level is drafted while what it may add is
worth more than the time it takes at the going rate; and nothing is drafted, at no cost, where plain decoding is faster.
What T, D and C leave out shows in whole steps: those with and those without drafts are held against what was expected of them.
Shapes: `R` requests, `N` nodes of a request, `F` frontier nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_eagle.control.calibration import Calibration
from vllm_eagle.control.costs import Costs, Curve
from vllm_eagle.tree import DraftTree

MARGIN = 0.02
"""How much faster than plain decoding drafting must promise to be."""
LOSS = 0.01
"""Share of time that probes may cost, in either direction."""
CHECK = 64
"""Steps with trees after which one is done without, to know what that takes today."""
BUDGETS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Nodes per request whose worth is remembered."""
FRESH = 0.1
"""Weight of a step in the moving averages of what trees look like, once there were enough steps for a mean of all."""


class Controller:
    """Price nodes; one instance serves all requests of an engine."""

    def __init__(self, costs: Costs, size: int, depth: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`size` and `depth` are the limits of a tree; `clock` returns seconds."""
        self.costs, self.calibration, self.clock = costs, Calibration(depth), clock
        # What trees of at most 1, 2, ... levels were like lately: value per request of the best J nodes per request.
        limits = np.arange(1, depth + 1)
        self._kept = np.array([j for j in BUDGETS if j < size] + [float(size)])  # J
        self._gains = np.minimum(3.2 * (1 - 0.8**self._kept), 0.8 * limits[:, None] ** 0.75)  # [levels, J], hopeful at first
        self._levels, self._width = limits.astype(np.float64), 2.0  # levels they really had; frontier nodes of a level
        self._drawn = 0  # how many draftings these are means of
        self._idle = self._busy = 0  # steps without drafts, steps with, since that last changed
        self._rate = self._price = self._drafting = 0.0  # the going rate, tokens a row must bring, seconds a drafting takes
        self._limit, self._planned, self._probing = depth, 0, False  # of the next trees
        self._running: tuple[Curve, int, float] | None = None  # what the head is doing: its curve, rows, and begin
        self._cycle: tuple[bool, int, float] | None = None  # of the step that is going on: drafts, requests, seconds expected
        self._verified = 0.0  # when the last verification ended
        self._frontiers: list[int] = []

    # Before drafting -----------------------------------------------------------------------------------------------

    def worthwhile(self, requests: int, others: int, missed: int) -> bool:
        """Decide whether to draft for `requests`, next to `others` rows, when the head has `missed` positions to read first."""
        if requests == 0:
            return False
        costs, rows = self.costs, requests + others
        kept = np.ceil(requests * self._kept)  # [J] nodes of the whole batch
        verify = costs.verify(rows + kept) + costs.rest
        alone = float(costs.verify(rows) + costs.rest)
        self._cycle = False, requests, alone
        plain = rows / alone
        drafting = float(costs.first(missed)) + (self._levels - 1) * float(costs.level(requests * self._width))  # [levels]
        rates = (rows + requests * self._gains) / (verify + drafting[:, None]) / costs.slip(requests)  # [levels, J]
        level, best = divmod(int(rates.argmax()), len(kept))
        drafted = float(rates[level, best])
        self._rate, self._drafting, self._limit = max(plain, drafted), float(drafting[level]), level + 1
        self._price = self._rate * (float(verify[best]) - rows / plain) / float(kept[best])
        self._planned, self._probing = int(kept[best]), drafted <= (1 + MARGIN) * plain
        if not self._probing:
            self._idle, self._busy = 0, self._busy + 1
            return self._busy % CHECK != 0
        self._busy, self._idle = 0, self._idle + 1
        pause = math.ceil(((float(verify[best]) + self._drafting) * plain / rows - 1) / LOSS)
        if self._idle < min(max(pause, CHECK // 4), 8 * CHECK):
            return False
        self._idle = 0
        return True

    # While a tree grows --------------------------------------------------------------------------------------------

    def begin(self, positions: int) -> None:
        """Start a drafting whose first pass reads `positions`."""
        self._frontiers = []
        self._running = self.costs.first, positions, self.clock()

    def calibrate(self, probabilities: NDArray[np.float32], level: int) -> NDArray[np.float32]:
        """Return the acceptance expected of nodes of `level` (0: the root's children), given the head's probabilities."""
        return self.calibration(probabilities, level)

    def deeper(self, level: int, values: NDArray[np.float32]) -> bool:
        """Decide whether to run the head over a frontier of values [R, F], the nodes of `level` (1: the root's children)."""
        self._finish()
        rows = values.size
        if level >= self._limit:
            return False
        gain = np.maximum(values * self.calibration.hits(level) - self._price, 0.0).sum()
        if gain <= self._rate * float(self.costs.level(rows)):
            return False
        self._frontiers.append(rows // len(values))
        self._running = self.costs.level, rows, self.clock()
        return True

    def choose(self, values: NDArray[np.float32], depths: NDArray[np.int32], others: int) -> list[int]:
        """Return how many nodes to keep of each request, from their values [R, N], best first, and their depths [R, N]."""
        self._finish()
        self._remember(values, depths)
        requests = len(values)
        order = np.sort(values, axis=None)[::-1]
        expected = requests + others + np.concatenate(([0.0], order.cumsum()))
        seconds = self.costs.verify(requests + others + np.arange(order.size + 1)) + self.costs.rest + self._drafting
        best = int((expected / seconds).argmax())
        if self._probing:
            best = max(best, min(self._planned, order.size))
        self._cycle = True, requests, float(seconds[best])
        return [int(count) for count in (values >= order[best - 1]).sum(1)] if best else [0] * requests

    def _remember(self, values: NDArray[np.float32], depths: NDArray[np.int32]) -> None:
        levels = 1 + len(self._frontiers)
        self._drawn += 1
        weight = max(FRESH, 1 / (1 + self._drawn))
        if self._frontiers:
            self._width += weight * (float(np.mean(self._frontiers)) - self._width)
        counts = np.minimum(np.ceil(len(values) * self._kept).astype(int), values.size) - 1
        limits = np.arange(1, len(self._levels) + 1)
        within = np.where(depths.ravel() <= limits[:, None], values.ravel(), 0.0)  # [levels, R*N]
        pooled = np.sort(within, axis=1)[:, ::-1].cumsum(1)[:, counts]  # [levels, J]
        self._gains += weight * (pooled / len(values) - self._gains)
        self._levels += weight * (np.minimum(limits, levels) - self._levels)

    def _finish(self) -> None:
        if self._running is not None:
            curve, rows, began = self._running
            curve.observe(max(1, rows), self.clock() - began)
            self._running = None

    # After verification --------------------------------------------------------------------------------------------

    def verified(self, trees: Sequence[DraftTree | None], paths: Sequence[Sequence[int]], steady: bool = True) -> None:
        """Take the accepted rows of every request's tree; `steady`: nothing but decoding since the last verification."""
        now = self.clock()
        if steady and self._cycle is not None:
            drafted, requests, expected = self._cycle
            self.costs.observe_cycle(drafted, requests, (now - self._verified) / expected)
        self._verified, self._cycle = now, None
        for tree, path in zip(trees, paths, strict=True):
            if tree is not None and tree.guesses is not None:
                self.calibration.observe(tree, path)

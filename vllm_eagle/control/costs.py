"""What a step costs, in seconds: curves measured at start-up, corrected by every step since.

Shapes: `n` row counts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

RECENT = 15
"""Steps whose median says how fast the machine is just now: it shrugs off a neighbour that takes it for a moment."""
CYCLES = 9
"""Steps whose median says how much longer than expected they take, for about as many requests, with drafts or without."""
TRUST = [1.0] * 4
"""What is known of them at first: that they take what is expected; four steps do not say otherwise."""
PATIENCE = 0.1
"""How far one step moves the shape of the curve near its row count."""


class Curve:
    """Seconds by rows: a shape measured at start-up and refined by steps, times how fast the machine is just now.

    A machine that slows down slows every row count, also those no step had lately; what one step says of its own row count
    against the others moves the shape a little.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """`rows` ascending, with the `seconds` measured for each."""
        self._rows = np.asarray(rows, np.float64)
        # More rows never take less time, and what disturbs a measurement makes it longer: the smaller one is right.
        self._shape = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1].copy()
        self._speeds: deque[float] = deque(maxlen=RECENT)
        self._speed = 1.0

    def __call__(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds expected for row counts [n]."""
        return self._speed * self._at(np.asarray(rows, np.float64))

    def points(self) -> tuple[list[float], list[float]]:
        """Return the row counts measured, and their seconds now."""
        return self._rows.tolist(), self(self._rows).tolist()

    def observe(self, rows: int, seconds: float) -> None:
        """Take a step of `rows` that took `seconds`."""
        ratio = seconds / float(self._at(np.asarray([rows], np.float64))[0])
        if self._speeds:
            near = int(np.abs(self._rows - rows).argmin())
            self._shape[near] *= min(max(ratio / self._speed, 0.5), 2.0) ** PATIENCE
            self._shape[:near] = np.minimum(self._shape[:near], self._shape[near])
            self._shape[near:] = np.maximum(self._shape[near:], self._shape[near])
        self._speeds.append(ratio)
        self._speed = median(self._speeds)

    def _at(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        inside: NDArray[np.float64] = np.interp(rows, self._rows, self._shape)
        if len(self._rows) < 2:
            return inside
        slope = (self._shape[-1] - self._shape[-2]) / (self._rows[-1] - self._rows[-2])
        inside += np.maximum(0.0, rows - self._rows[-1]) * slope
        return inside


class Costs:
    """The parts of a step: the target's pass over all rows, the head's first pass, its further levels, and what is left."""

    def __init__(self, verify: Curve, first: Curve, level: Curve) -> None:
        """`verify` by rows of the target; `first` by newly known positions and `level` by frontier nodes of the head."""
        self.verify, self.first, self.level = verify, first, level
        self._rest: deque[float] = deque([0.0], maxlen=RECENT)
        self._cycles: defaultdict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(TRUST, maxlen=CYCLES))

    @property
    def rest(self) -> float:
        """Return the seconds between two steps: scheduling, and handing out tokens."""
        return median(self._rest)

    def observe_rest(self, seconds: float) -> None:
        """Take the time between two steps that followed each other."""
        self._rest.append(seconds)

    def slip(self, requests: int) -> float:
        """Return how much longer steps with drafts take than expected, against steps without, for about as many requests.

        Whatever the curves leave out is in it: what belongs to no pass, or hangs on the number of requests.
        """
        with_drafts, without = (median(self._cycles[drafted, requests.bit_length()]) for drafted in (True, False))
        return with_drafts / without

    def observe_cycle(self, drafted: bool, requests: int, ratio: float) -> None:
        """Take a step's time from one verification's end to the next one's, by the time expected."""
        self._cycles[drafted, requests.bit_length()].append(ratio)

"""What a step costs, in seconds: a curve measured at start-up, corrected by every step since.

Shapes: `n` row counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

RECENT = 9
"""Steps a row count is judged by: their median shrugs off a neighbour that takes the machine for a moment."""


class Curve:
    """Seconds by rows: the shape measured at start-up, times how much slower than that recent steps were.

    The correction is the median of the last steps near the same row count, and of the last steps at all where there are none.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """`rows` ascending, with the `seconds` measured for each."""
        self._rows = np.asarray(rows, np.float64)
        self._seconds = np.maximum.accumulate(np.asarray(seconds, np.float64))  # more rows never take less time
        self._near: list[deque[float]] = [deque(maxlen=RECENT) for _ in rows]
        self._all: deque[float] = deque(maxlen=3 * RECENT)
        self._corrected = self._seconds.copy()

    def __call__(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds expected for row counts [n]."""
        return self._at(np.asarray(rows, np.float64), self._corrected)

    def observe(self, rows: int, seconds: float) -> None:
        """Take a step of `rows` that took `seconds`."""
        factor = seconds / float(self._at(np.asarray([rows], np.float64), self._seconds)[0])
        self._near[int(np.abs(self._rows - rows).argmin())].append(factor)
        self._all.append(factor)
        general = float(np.median(self._all))
        factors = np.array([np.median(near) if len(near) >= 3 else general for near in self._near])
        self._corrected = np.maximum.accumulate(self._seconds * factors)

    def _at(self, rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        inside = np.interp(rows, self._rows, seconds)
        if len(self._rows) < 2:
            return inside
        slope = (seconds[-1] - seconds[-2]) / (self._rows[-1] - self._rows[-2])
        beyond: NDArray[np.float64] = inside + np.maximum(0.0, rows - self._rows[-1]) * slope
        return beyond


class Costs:
    """The parts of a step: the target's pass over all rows, the head's first pass, its further levels, and what is left."""

    def __init__(self, verify: Curve, first: Curve, level: Curve) -> None:
        """`verify` by rows of the target; `first` by newly known positions and `level` by frontier nodes of the head."""
        self.verify, self.first, self.level = verify, first, level
        self._rest: deque[float] = deque([0.0], maxlen=3 * RECENT)

    @property
    def rest(self) -> float:
        """Return the seconds between two steps: scheduling, and handing out tokens."""
        return float(np.median(self._rest))

    def observe_rest(self, seconds: float) -> None:
        """Take the time between two steps that followed each other."""
        self._rest.append(seconds)

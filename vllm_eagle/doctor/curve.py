"""What a row costs on this machine: the curve that decides how large trees may be, drawn in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WIDTH = 40
_WORTH = 1.6
"""Tokens a step of a 12-node tree writes with a usable head; what it may cost in time, then."""


def plot(rows: Sequence[float], seconds: Sequence[float]) -> str:
    """Return a bar for each row count."""
    most = max(seconds)
    lines = [
        (int(count), "█" * max(1, round(_WIDTH * took / most)), 1e3 * took, took / seconds[0])
        for count, took in zip(rows, seconds, strict=True)
    ]
    return "\n".join(f"  {count:>5} rows {bar:<{_WIDTH}} {ms:7.1f} ms  ×{ratio:.2f}" for count, bar, ms, ratio in lines)


def advice(rows: Sequence[float], seconds: Sequence[float]) -> str:
    """Say up to how many requests a tree of 12 nodes for each of them is likely to pay."""

    def cost(count: float) -> float:
        return float(np.interp(count, rows, seconds))

    pays = [n for n in range(1, int(rows[-1] // 13) + 1) if cost(13 * n) < _WORTH * cost(n)]
    if not pays:
        return "rows are dear here: even one request's tree of 12 nodes costs more than it is likely to bring; use fewer nodes"
    return (
        f"trees of 12 nodes are likely to pay up to {pays[-1]} request{'s' if pays[-1] > 1 else ''} at once; "
        f"--speculative-tree-size auto goes by this curve"
    )

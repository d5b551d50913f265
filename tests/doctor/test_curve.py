from __future__ import annotations

from vllm_eagle.doctor import curve

ROWS = [1.0, 4.0, 16.0, 64.0, 256.0]


def test_the_longest_bar_is_the_dearest_row_count() -> None:
    """Catches bars that are not in proportion."""
    lines = curve.plot(ROWS, [0.05, 0.05, 0.1, 0.2, 0.8]).splitlines()
    assert [line.count("█") for line in lines] == [2, 2, 5, 10, 40]
    assert lines[2].endswith("100.0 ms  ×2.00")


def test_advice() -> None:
    """Catches trees recommended where every row costs its full price, and a limit that is off by much."""
    assert "rows are dear here" in curve.advice(ROWS, ROWS)
    assert "up to 19 requests at once" in curve.advice(ROWS, [0.05] * 5)
    assert "up to 1 request at once" in curve.advice(ROWS, [1.0, 1.5, 1.5, 6.4, 25.6])

"""Curves of seconds: measured at start-up, corrected by steps."""

from __future__ import annotations

import pytest

from vllm_eagle.control import Costs, Curve
from vllm_eagle.control.costs import CYCLES, RECENT


def test_between_and_beyond_the_measured_rows() -> None:
    """Catches a step of a size nobody measured priced at nothing, or as the largest measured."""
    curve = Curve([1, 4, 8], [10.0, 40.0, 60.0])
    assert curve([1, 2.5, 4, 6, 8, 16]).tolist() == [10, 25, 40, 50, 60, 100]
    assert float(Curve([4], [7.0])(9)) == 7


def test_more_rows_never_cost_less() -> None:
    """Catches a measurement disturbed by a neighbour that makes larger trees look free, or few rows dear for ever."""
    curve = Curve([1, 2, 4], [30.0, 10.0, 40.0])
    assert curve([1, 2, 3, 4]).tolist() == [10, 10, 25, 40]


def test_steps_correct_their_neighbours_in_both_directions() -> None:
    """Catches a row count measured too dear that stays so, however many larger steps were faster."""
    curve = Curve([1, 8, 64], [20.0, 20.0, 60.0])
    for _ in range(200):
        curve.observe(8, 10.0)
        curve.observe(64, 60.0)
    assert float(curve(1)) <= float(curve(8)) == pytest.approx(10, rel=0.1)


def test_a_machine_that_slows_down_slows_every_row_count() -> None:
    """Catches row counts no step had lately priced at the speed of yesterday, which then look cheaper than the others."""
    curve = Curve([1, 8, 64], [10.0, 20.0, 30.0])
    for _ in range(RECENT):
        curve.observe(1, 20.0)
    assert curve([1, 8, 64]).tolist() == pytest.approx([20, 40, 60])


def test_steps_refine_the_shape() -> None:
    """Catches a start-up measurement that is believed for ever where steps of other sizes tell another story."""
    curve = Curve([1, 8, 64], [10.0, 20.0, 30.0])
    for _ in range(100):
        curve.observe(1, 10.0)
        curve.observe(9, 40.0)
    assert float(curve(8)) / float(curve(1)) == pytest.approx(4, rel=0.1)
    assert float(curve(64)) >= float(curve(8))


def test_a_disturbed_step_is_shrugged_off() -> None:
    """Catches averages, in which one step that took a hundred times longer decides the next hundred."""
    curve = Curve([1, 8], [10.0, 20.0])
    for step in range(3 * RECENT):
        curve.observe(1, 10.0 if step % 4 else 1000.0)
    assert float(curve(1)) == pytest.approx(10, rel=0.2)


def test_whole_steps_say_what_the_curves_leave_out() -> None:
    """Catches a slip believed after one slow step, one of another load, and one that all steps have in common."""
    costs = Costs(*(Curve([1], [1.0]) for _ in range(3)))
    for _ in range(3):
        costs.observe_cycle(True, 8, 2.0)
    assert costs.slip(8) == 1
    for _ in range(CYCLES):
        costs.observe_cycle(True, 8, 1.5)
    assert (costs.slip(8), costs.slip(15), costs.slip(7), costs.slip(16)) == (1.5, 1.5, 1, 1)
    for _ in range(CYCLES):
        costs.observe_cycle(False, 9, 1.25)
    assert costs.slip(8) == pytest.approx(1.2)

"""The head's probabilities, corrected by what was accepted."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_eagle.control import Calibration
from vllm_eagle.tree import DraftTree


def tree(guesses: list[float]) -> DraftTree:
    """Return a root with two children, of which the first has two of its own."""
    built = DraftTree.build([0, 1, 2, 3, 4], [-1, 0, 0, 1, 1])
    return DraftTree(built.tokens, built.parents, built.depths, built.words, np.array([1.0, *guesses], np.float32))


def expected(calibration: Calibration, probability: float, level: int) -> float:
    return float(calibration(np.array([probability], np.float32), level)[0])


def test_without_evidence_the_head_is_believed() -> None:
    """Catches a cold start at which nothing, or everything, is drafted."""
    assert [expected(Calibration(2), p, 1) for p in (0.05, 0.5, 1.0)] == pytest.approx([0.05, 0.5, 1.0])


def test_what_is_accepted_counts_by_level_and_probability() -> None:
    """Catches levels or siblings mixed up: only children of accepted nodes were tried at all."""
    calibration = Calibration(2)
    for step in range(400):
        calibration.observe(tree([0.75, 0.15, 0.75, 0.15]), [1, 4] if step % 2 else [2])
    assert expected(calibration, 0.75, 0) == pytest.approx(0.5, abs=0.02)
    assert expected(calibration, 0.15, 0) == pytest.approx(0.5, abs=0.02)
    assert expected(calibration, 0.75, 1) == pytest.approx(0.0, abs=0.05)  # tried in every second step alone
    assert expected(calibration, 0.15, 1) == pytest.approx(1.0, abs=0.05)
    assert calibration.hits(0) == pytest.approx(1.0, abs=0.01)
    assert calibration.hits(1) == pytest.approx(1.0, abs=0.01)
    assert calibration.error().tolist() == pytest.approx([0.3, 0.8], abs=0.01)


def test_a_boastful_level_is_distrusted_where_nothing_was_tried_yet() -> None:
    """Catches a useless head that is given a fresh chance in every bin of probability."""
    calibration = Calibration(2)
    for _ in range(100):
        calibration.observe(tree([0.75, 0.15, 0.75, 0.15]), [])
    assert expected(calibration, 0.95, 0) < 0.2
    assert expected(calibration, 0.95, 1) == pytest.approx(0.95)  # nobody has stood there


def test_old_evidence_fades() -> None:
    """Catches a head judged by the texts of yesterday."""
    calibration = Calibration(2)
    for _ in range(5000):
        calibration.observe(tree([0.75, 0.15, 0.75, 0.15]), [])
    for _ in range(2000):
        calibration.observe(tree([0.75, 0.15, 0.75, 0.15]), [1])
    assert expected(calibration, 0.75, 0) > 0.6


def test_trees_cut_or_pruned_keep_their_guesses() -> None:
    """Catches guesses that belong to other nodes after the scheduler or a grammar took some away."""
    whole = tree([0.7, 0.2, 0.6, 0.1])
    for part, rows in ((whole.prefix(3), [0, 1, 2, 3]), (whole.subset([0, 1, 4]), [0, 1, 4])):
        assert part.guesses is not None and whole.guesses is not None
        assert part.guesses.tolist() == whole.guesses[rows].tolist()

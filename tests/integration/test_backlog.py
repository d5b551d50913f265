"""What the head missed comes back in order, or not at all."""

from __future__ import annotations

import numpy as np
import torch

from vllm_eagle.drafting import Known
from vllm_eagle.integration import backlog
from vllm_eagle.integration.backlog import Backlog


def known(**requests: tuple[int, int]) -> Known:
    """Make a step: by request, its first newly known position and how many; position p has feature [p] and token 10 p."""
    places = [np.arange(first, first + count) for first, count in requests.values()]
    positions = np.concatenate(places)
    return Known(
        request_ids=list(requests),
        features=torch.from_numpy(positions).float().unsqueeze(1),
        next_tokens=torch.from_numpy((positions + 1) * 10),
        positions=torch.from_numpy(positions),
        lengths=torch.tensor([len(place) for place in places], dtype=torch.int32),
        rooms=[1] * len(places),
        histories=[np.arange(int(place[-1]) + 2, dtype=np.int32) * 10 for place in places],
    )


def test_nothing_missed_nothing_changed() -> None:
    """Catches a copy on the usual path."""
    step = known(a=(3, 2))
    assert Backlog().join(step) is step


def test_missed_positions_come_first() -> None:
    """Catches features and tokens of several requests interleaved wrongly, after two failures in a row."""
    log = Backlog()
    log.keep(known(a=(0, 3), b=(7, 1)))
    log.keep(log.join(known(b=(8, 2), a=(3, 1))))
    got, want = log.join(known(a=(4, 2), c=(5, 1), b=(10, 1))), known(a=(0, 6), c=(5, 1), b=(7, 4))
    for field in ("features", "next_tokens", "positions", "lengths"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    assert torch.equal(got.roots, want.roots)
    assert len(log) == 0


def test_a_gap_is_not_closed() -> None:
    """Catches features of before a preemption given to the positions of the prefill after it."""
    log = Backlog()
    log.keep(known(a=(10, 3), b=(4, 1)))
    step = known(a=(0, 8), b=(5, 1))
    got = log.join(step)
    assert got.lengths.tolist() == [8, 2]
    assert got.positions.tolist() == [*range(8), 4, 5]


def test_what_is_kept_is_limited_and_dropped_with_its_request() -> None:
    """Catches memory that grows while a drafter keeps failing, or after the request has ended."""
    log = Backlog()
    log.keep(known(a=(0, backlog.LIMIT + 1), b=(0, 1)))
    assert len(log) == 1
    log.drop("b")
    log.drop("b")
    assert len(log) == 0

"""What a step carries: which rows go where."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from vllm_eagle.integration.step import Step
from vllm_eagle.tree import DraftTree


def test_single_rows_ride_with_the_trees() -> None:
    """Catches requests without a tree split from the others, with two attentions in every layer, or counted as trees."""
    tree = DraftTree.build([7, 8, 9], [-1, 0, 0])
    step = Step(
        trees=[None, tree, None, None],  # decodes; drafted; reads a prompt; decodes
        starts=np.array([0, 1, 4, 9], np.int32),
        counts=np.array([1, 3, 5, 1], np.int32),
        computed=np.array([20, 30, 0, 40], np.int32),
        slots={0: torch.arange(10)},
        walk=SimpleNamespace(paths=[[], [2], [], []]),  # type: ignore[arg-type]
    )
    rows, positions = step.positions()
    assert rows.tolist() == [0, 1, 2, 3, 9] and positions.tolist() == [20, 30, 31, 31, 40]
    assert (step.owners, step.others(), step.node_rows().tolist()) == ([1], [2], [2, 3])
    source, target = step.accepted()
    assert source.tolist() == [3]  # the second node, among the five rows laid out
    assert target.tolist() == [2]  # the slot behind the root
    known, places, counts = step.known()
    assert known.tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9] and counts.tolist() == [1, 2, 5, 1]
    assert places.tolist() == [20, 30, 31, 0, 1, 2, 3, 4, 40]


def test_without_trees_all_is_vllms_own() -> None:
    """Catches plain decoding that leaves vLLM's attention: its ids would no longer be those of vLLM alone to the bit."""
    one = np.ones(2, np.int32)
    step = Step(trees=[None, None], starts=np.arange(2, dtype=np.int32), counts=one, computed=one, slots={})
    assert (step.owners, step.laid, step.others()) == ([], {}, [0, 1])

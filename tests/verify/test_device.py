"""The device's walk against the host's, on CPU tensors; and that nothing in it waits for a device, on meta tensors.

A meta tensor has a shape and no numbers: whoever reads one, or mixes it with the host's tensors, fails. No GPU is needed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_eagle.tree import DraftTree
from vllm_eagle.verify import retrace, walk_greedy
from vllm_eagle.verify.device import accepted_places, greedy, tree_table, walk_on_device

WIDE = 64


def random_batch(seed: int) -> tuple[list[DraftTree | None], list[bool], list[np.ndarray]]:
    """Return trees over three words, so that many draws are in them; requests without one, and some that do not take part."""
    random = np.random.default_rng(seed)
    trees: list[DraftTree | None] = []
    for _ in range(12):
        tokens, parents = [0], [-1]
        for _ in range(int(random.integers(0, 60))):
            parent, token = int(random.integers(0, len(tokens))), int(random.integers(0, 3))
            if (parent, token) not in set(zip(parents, tokens, strict=True)):
                tokens.append(token)
                parents.append(parent)
        trees.append(DraftTree.build(tokens, parents) if random.random() > 0.2 else None)
    best = [random.integers(0, 3, 1 if tree is None else len(tree.tokens)) for tree in trees]
    return trees, (random.random(12) > 0.2).tolist(), best


def rows_of(best: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    counts = torch.tensor([len(rows) for rows in best])
    return torch.from_numpy(np.concatenate(best)), counts.cumsum(0) - counts


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_walk(seed: int) -> None:
    """Catches a step to another parent's child or a missing row, a request that walks on, and tokens behind the end."""
    trees, taking_part, best = random_batch(seed)
    levels = 1 + max(int(tree.depths.max()) for tree in trees if tree is not None)
    want = walk_greedy(trees, taking_part, best)
    got = walk_on_device(tree_table(trees, WIDE), torch.tensor(taking_part), greedy(*rows_of(best)), levels)
    assert got.emitted.shape == (12, levels) and got.paths.shape == (12, levels - 1)
    for table, lists in ((got.emitted, want.emitted), (got.paths, want.paths)):
        assert table.tolist() == [row + [-1] * (table.shape[1] - len(row)) for row in lists]
    assert retrace(trees, want.emitted) == want


def test_a_walk_without_trees() -> None:
    """Catches levels taken from trees that are not there."""
    got = walk_on_device(tree_table([None, None], WIDE), torch.tensor([True, False]), greedy(*rows_of([np.array([5])] * 2)), 1)
    assert got.emitted.tolist() == [[5], [-1]] and got.paths.shape == (2, 0)


def test_places_of_accepted_rows() -> None:
    """Catches K/V of a node in another request's slot, behind the root by one, or taken from the row before."""
    paths = torch.tensor([[2, 5, -1], [-1, -1, -1], [1, 2, 3]])
    slots = torch.stack((torch.arange(100, 120), torch.arange(220, 200, -1)))
    source, target = accepted_places(paths, torch.tensor([0, -1, 6]), torch.tensor([3, 9, 16]), slots)
    assert source.tolist() == [2, 5, -1, -1, -1, -1, 7, 8, 9]
    assert target.tolist() == [
        [104, 105, -1, -1, -1, -1, 117, 118, 119],
        [216, 215, -1, -1, -1, -1, 203, 202, 201],
    ]


def test_nothing_waits_for_the_device() -> None:
    """Catches a look at a number that is still on the device, and a tensor that never went there."""
    trees, _, best = random_batch(1)
    host_best, host_first = rows_of(best)
    table, taking_part = tree_table(trees, WIDE).to("meta"), torch.empty(len(trees), dtype=torch.bool, device="meta")
    first, slots = host_first.to("meta"), torch.empty(2, 500, dtype=torch.int64, device="meta")
    got = walk_on_device(table, taking_part, greedy(host_best.to("meta"), first), 6)
    source, target = accepted_places(got.paths, first, first, slots)
    assert got.emitted.shape == (12, 6) and source.shape == (60,) and target.shape == (2, 60)
    assert all(tensor.is_meta for tensor in (got.emitted, got.paths, source, target))

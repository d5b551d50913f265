"""The tree type: what it refuses, what it derives, and that any prefix is a tree."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_eagle.errors import TreeError
from vllm_eagle.tree import MAX_NODES, DraftTree


def test_derives_depths_and_words() -> None:
    """Catches an ancestor word that misses the root, the row itself or a grandparent."""
    tree = DraftTree.build([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3])
    assert tree.depths.tolist() == [0, 1, 1, 2, 3]
    assert [bin(word) for word in tree.words] == ["0b1", "0b11", "0b101", "0b1011", "0b11011"]
    assert tree.nodes == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", range(5))
def test_every_prefix_is_a_tree(cut: int) -> None:
    """Catches an order in which cutting the tail orphans a node."""
    tree = DraftTree.build([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3]).prefix(cut)
    tree.validate()
    assert tree.size == cut


def test_the_last_bit_is_usable() -> None:
    """Catches a sign error in bit 63."""
    tree = DraftTree.build(list(range(MAX_NODES + 1)), list(range(-1, MAX_NODES)))
    tree.validate()
    assert np.uint64(tree.words[-1].astype(np.uint64)) == np.uint64(2**64 - 1)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2], [-1], "as many parents"),
        ([1, 2], [0, 0], "row 0 is the root"),
        ([1, 2, 3], [-1, 2, 0], "parents stand before"),
        ([1, 2, 2], [-1, 0, 0], "distinct tokens"),
        (range(MAX_NODES + 2), range(-1, MAX_NODES + 1), "over the limit"),
    ],
)
def test_refuses_what_is_no_tree(tokens: list[int], parents: list[int], message: str) -> None:
    """Catches a broken structure reaching the attention mask."""
    with pytest.raises(TreeError, match=message):
        DraftTree.build(list(tokens), list(parents))

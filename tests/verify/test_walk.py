"""The walk: its law on a toy vocabulary by enumeration, and who takes part in which draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_eagle.tree import DraftTree
from vllm_eagle.verify import STOPPED, walk, walk_greedy

TREE = DraftTree.build([9, 1, 2, 1, 2, 1], [-1, 0, 0, 2, 2, 4])  # 9 -> {1, 2 -> {1, 2 -> {1}}}


def scripted(draws: list[list[int]], seen: list[list[int]]):  # type: ignore[no-untyped-def]
    """Sample from a script: draws[r] are the target's own tokens of request r, one by one."""

    def sample(rows: NDArray[np.int64], emitted: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        seen.append(rows.tolist())
        return np.array([draws[r][len(emitted[r])] if rows[r] != STOPPED else 1 for r in range(len(rows))])

    return sample


def test_emits_what_the_target_draws_and_stops_where_the_tree_ends() -> None:
    """Catches acceptance of a node under another parent, and tokens emitted that were not drawn."""
    seen: list[list[int]] = []
    draws = [[2, 2, 1, 7], [1, 2, 2, 2], [5, 2, 2, 2], [2, 3, 2, 2], [2, 1, 1, 1]]
    result = walk([TREE] * 5, [True] * 5, scripted(draws, seen))
    assert result.emitted == [[2, 2, 1, 7], [1, 2], [5], [2, 3], [2, 1, 1]]
    assert result.paths == [[2, 4, 5], [1], [], [2], [2, 3]]
    assert seen == [[0] * 5, [2, 1, -1, 2, 2], [4, -1, -1, -1, 3], [5, -1, -1, -1, -1]]


def test_requests_without_tree_sample_once_and_discarded_ones_never() -> None:
    """Catches a random draw consumed for a request whose prompt is not finished."""
    seen: list[list[int]] = []
    result = walk([None, TREE, None], [True, True, False], scripted([[4, 4], [8, 8], [1, 1]], seen))
    assert result.emitted == [[4], [8], []]
    assert seen == [[0, 0, STOPPED]]


def test_greedy_walk_is_the_walk() -> None:
    """Catches a fast path that differs: every table of best tokens over 3 tokens, against the general walk."""
    tree = DraftTree.build([0, 1, 2, 1], [-1, 0, 0, 1])
    for code in range(3**4):
        best = np.array([code // 3**i % 3 for i in range(4)])
        slow = walk([tree], [True], lambda rows, emitted, best=best: best[np.maximum(rows, 0)])
        fast = walk_greedy([tree], [True], [best])
        assert (slow.emitted, slow.paths) == (fast.emitted, fast.paths)


def test_law_is_the_targets_for_any_tree() -> None:
    """Catches any bias: over all draws the probability of a text is the product of the target's, whatever the tree."""
    vocab, length = 3, 3
    target = {(): [0.5, 0.3, 0.2], 0: [0.1, 0.6, 0.3], 1: [0.4, 0.4, 0.2], 2: [0.2, 0.2, 0.6]}
    trees = [TREE, DraftTree.build([0, 0, 0, 0], [-1, 0, 1, 2]), DraftTree.build([0, 2, 1, 0], [-1, 0, 0, 0])]
    for tree in trees:
        law: dict[tuple[int, ...], float] = {}
        for code in range(vocab**length):
            text = [code // vocab**i % vocab for i in range(length)]
            chance = np.prod([target[() if i == 0 else text[i - 1]][t] for i, t in enumerate(text)])
            written: list[int] = []
            while len(written) < length:  # step after step, as serving does
                left = text[len(written) :] + [0] * length
                written += walk([tree], [True], scripted([left], [])).emitted[0]
            law[tuple(written[:length])] = law.get(tuple(written[:length]), 0.0) + float(chance)
        assert sum(law.values()) == 1.0 or abs(sum(law.values()) - 1) < 1e-12
        assert len(law) == vocab**length

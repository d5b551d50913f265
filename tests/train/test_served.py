from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.train.naive import draft, random_head
from vllm_eagle.heads import EagleHead
from vllm_eagle.train.features import Example
from vllm_eagle.train.served import Served, accepted_lengths, draft_everywhere, walk_answer
from vllm_eagle.train.target import head_config
from vllm_eagle.train.words import Words
from vllm_eagle.tree import DraftTree, DynamicGrowth, StaticGrowth


def _grow(
    head: EagleHead, example: Example, words: Words, start: int, vocabulary: Tensor, growth: DynamicGrowth
) -> set[tuple[int, ...]]:
    """Grow the tree of one round node by node; return its paths."""
    values: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(growth.depth):
        children: dict[tuple[int, ...], float] = {}
        for path in level:
            logits = words.lm_head @ draft(head, example, words, start, list(path))
            best = logits.log_softmax(-1).topk(growth.top_k)
            for value, row in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children[(*path, int(vocabulary[row]))] = values.get(path, 0.0) + value
        values |= children
        level = sorted(children, key=lambda path: -children[path])[: growth.top_k]
    return set(sorted(values, key=lambda path: -values[path])[: growth.size])


def test_the_tree_is_the_one_a_draft_would_grow(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches wrong ancestors' keys, positions, or a count of accepted tokens that is not the path in the tree."""
    config, growth, example = head_config(toy_folder, 1), DynamicGrowth(size=9, depth=4, top_k=3), toy_examples[0]
    vocabulary = toy_words.places.argsort()[-len(toy_words.lm_head) :]
    for seed in range(3):
        head = random_head(config, seed)
        if seed == 2:  # one that is often right: it repeats what the sequence does anyway
            head.fc.weight[:, 32:] = torch.eye(32)
        lengths = accepted_lengths(head, example, toy_words, vocabulary, growth)
        for i in (0, 3, 11, 22):
            paths = _grow(head, example, toy_words, 5 + i, vocabulary, growth)
            truth = example.tokens[7 + i :].tolist()
            expected = sum(tuple(truth[:n]) in paths for n in range(1, min(growth.depth, len(truth)) + 1))
            assert int(lengths[i]) == expected


def test_two_layers_and_static_trees_are_drafted(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches keys of one layer read by another, and a shape whose levels differ in width."""
    head, example = random_head(head_config(toy_folder, 2)), toy_examples[1]
    vocabulary = toy_words.places.argsort()[-len(toy_words.lm_head) :]
    trees = draft_everywhere(head, example, toy_words, vocabulary, StaticGrowth([[0], [1], [1, 0], [1, 2], [1, 2, 0]]))
    for i in (0, 4, 21):
        path: list[int] = []
        for ranks in ([1], [0, 2], [0]):  # the shape's ranks of each level, along its deepest path
            best = (toy_words.lm_head @ draft(head, example, toy_words, 5 + i, path)).argsort(descending=True)
            here = trees[i].parents == _row(trees[i], path)
            assert {int(vocabulary[best[rank]]) for rank in ranks} <= set(trees[i].tokens[here].tolist())
            path.append(int(vocabulary[best[ranks[-1]]]))


def _row(tree: DraftTree, path: list[int]) -> int:
    row = 0
    for token in path:
        row = int(((tree.parents == row) & (tree.tokens == token)).argmax())
    return row


def test_a_walk_skips_what_was_accepted() -> None:
    """Catches a mean over all positions, which serving never visits."""
    assert walk_answer(torch.tensor([2, 9, 9, 0, 1])) == Served(drafts=3, accepted=3)

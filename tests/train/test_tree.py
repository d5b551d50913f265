from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.train.naive import draft, logits, random_head
from vllm_eagle.heads import Eagle3Head, EagleHead, Head
from vllm_eagle.train.features import Example
from vllm_eagle.train.target import head_config
from vllm_eagle.train.tree import TreeShape, accepted_lengths, walk
from vllm_eagle.train.words import Words


def _grow(head: Head, example: Example, words: Words, start: int, vocabulary: Tensor, shape: TreeShape) -> set[tuple[int, ...]]:
    """Grow the tree of one round node by node; return its paths."""
    values: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(shape.levels):
        children: dict[tuple[int, ...], float] = {}
        for path in level:
            out = draft(head, example, words, start, list(path))
            best = logits(head, out, words).log_softmax(-1).topk(shape.width)
            for value, row in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children[(*path, int(vocabulary[row]))] = values.get(path, 0.0) + value
        values |= children
        level = sorted(children, key=lambda path: -children[path])[: shape.width]
    return set(sorted(values, key=lambda path: -values[path])[: shape.nodes])


def test_the_tree_is_the_one_a_draft_would_grow(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches wrong ancestors' keys, positions, or a count of accepted tokens that is not the path in the tree."""
    config, shape, example = head_config(toy_folder, 1), TreeShape(nodes=9, width=3, levels=4), toy_examples[0]
    vocabulary = toy_words.places.argsort()[-len(toy_words.lm_head) :]
    for seed in range(3):
        head = random_head(config, seed)
        if seed == 2 and isinstance(head, EagleHead):  # one that is often right: it repeats what the sequence does anyway
            head.fc.weight[:, 32:] = torch.eye(32)
        lengths = accepted_lengths(head, example, toy_words, vocabulary, shape)
        for i in (0, 3, 11, 22):
            paths = _grow(head, example, toy_words, 5 + i, vocabulary, shape)
            truth = example.tokens[7 + i :].tolist()
            expected = sum(tuple(truth[:n]) in paths for n in range(1, min(shape.levels, len(truth)) + 1))
            assert int(lengths[i]) == expected


def test_an_eagle3_head_grows_its_own_tree(toy_folder: Path, toy_states: list[Example], toy_draft_words: Words) -> None:
    """Catches a tree read out through the target's LM head, and rows taken for tokens."""
    words, shape, example = toy_draft_words, TreeShape(nodes=9, width=3, levels=3), toy_states[0]
    head = random_head(head_config(toy_folder, 1, None, 60, (0, 1, 2)), words=words)
    assert isinstance(head, Eagle3Head)
    hidden, _ = head.readout(draft(head, example, words, 8, []), words.lm_head)
    head.lm_head.weight[words.places[example.tokens[10]]] = hidden  # so that round 3, at slot 8, guesses right
    lengths = accepted_lengths(head, example, words, head.vocabulary, shape)
    for i in range(23):
        paths = _grow(head, example, words, 5 + i, head.vocabulary, shape)
        truth = example.tokens[7 + i :].tolist()
        assert int(lengths[i]) == sum(tuple(truth[:n]) in paths for n in range(1, min(shape.levels, len(truth)) + 1))
    assert int(lengths[3]) > 0


def test_a_walk_skips_what_was_accepted() -> None:
    """Catches a mean over all positions, which serving never visits."""
    assert walk(torch.tensor([2, 9, 9, 0, 1])) == (3, 6)

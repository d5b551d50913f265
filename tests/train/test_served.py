from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.train.naive import draft, logits, random_head
from vllm_eagle.heads import Eagle3Head, EagleHead, Head
from vllm_eagle.train.evaluate import chain_acceptance
from vllm_eagle.train.features import Example
from vllm_eagle.train.served import Served, accepted_lengths, draft_everywhere, serve, walk_answer
from vllm_eagle.train.target import head_config
from vllm_eagle.train.words import Words
from vllm_eagle.tree import DraftTree, DynamicGrowth, StaticGrowth


def _grow(head: Head, example: Example, words: Words, start: int, growth: DynamicGrowth) -> set[tuple[int, ...]]:
    """Grow the tree of one round node by node; return its paths."""
    values: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(growth.depth):
        children: dict[tuple[int, ...], float] = {}
        for path in level:
            out = draft(head, example, words, start, list(path))
            best = logits(head, out, words).log_softmax(-1).topk(growth.top_k)
            for value, row in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children[(*path, int(words.vocabulary[row]))] = values.get(path, 0.0) + value
        values |= children
        level = sorted(children, key=lambda path: -children[path])[: growth.top_k]
    return set(sorted(values, key=lambda path: -values[path])[: growth.size])


def _accepted(head: Head, example: Example, words: Words, number: int, growth: DynamicGrowth) -> int:
    """Return how many tokens of the answer the tree of round `number` holds; 6 prompt tokens: round 0 starts at slot 5."""
    paths, truth = _grow(head, example, words, 5 + number, growth), example.tokens[7 + number :].tolist()
    return sum(tuple(truth[:n]) in paths for n in range(1, min(growth.depth, len(truth)) + 1))


def test_the_tree_is_the_one_a_draft_would_grow(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches wrong ancestors' keys, positions, or a count of accepted tokens that is not the path in the tree."""
    config, growth, example = head_config(toy_folder, 1), DynamicGrowth(size=9, depth=4, top_k=3), toy_examples[0]
    for seed in range(3):
        head = random_head(config, seed)
        if seed == 2 and isinstance(head, EagleHead):  # one that is often right: it repeats what the sequence does anyway
            head.fc.weight[:, 32:] = torch.eye(32)
        lengths = accepted_lengths(head, example, toy_words, growth)
        for i in (0, 3, 11, 22):
            assert int(lengths[i]) == _accepted(head, example, toy_words, i, growth)


def test_two_layers_and_static_trees_are_drafted(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches keys of one layer read by another, and a shape whose levels differ in width."""
    head, example = random_head(head_config(toy_folder, 2)), toy_examples[1]
    trees = draft_everywhere(head, example, toy_words, StaticGrowth([[0], [1], [1, 0], [1, 2], [1, 2, 0]]))
    for i in (0, 4, 21):
        path: list[int] = []
        for ranks in ([1], [0, 2], [0]):  # the shape's ranks of each level, along its deepest path
            best = (toy_words.lm_head @ draft(head, example, toy_words, 5 + i, path)).argsort(descending=True)
            here = trees[i].parents == _row(trees[i], path)
            assert {int(toy_words.vocabulary[best[rank]]) for rank in ranks} <= set(trees[i].tokens[here].tolist())
            path.append(int(toy_words.vocabulary[best[ranks[-1]]]))


def _row(tree: DraftTree, path: list[int]) -> int:
    row = 0
    for token in path:
        row = int(((tree.parents == row) & (tree.tokens == token)).argmax())
    return row


def test_an_eagle3_head_grows_its_own_tree(toy_folder: Path, toy_states: list[Example], toy_draft_words: Words) -> None:
    """Catches a tree read out through the target's LM head, states fused twice or never, and rows taken for tokens."""
    words, growth, example = toy_draft_words, DynamicGrowth(size=9, depth=3, top_k=3), toy_states[0]
    head = random_head(head_config(toy_folder, 1, None, 60, (0, 1, 2)), words=words)
    assert isinstance(head, Eagle3Head)
    hidden, _ = head.readout(draft(head, example, words, 8, []), words.lm_head)
    head.lm_head.weight[words.places[example.tokens[10]]] = hidden  # so that round 3, at slot 8, guesses right
    lengths = accepted_lengths(head, example, words, growth)
    assert lengths.tolist() == [_accepted(head, example, words, i, growth) for i in range(23)]
    assert int(lengths[3]) > 0


def test_a_walk_skips_what_was_accepted() -> None:
    """Catches a mean over all positions, which serving never visits."""
    assert walk_answer(torch.tensor([2, 9, 9, 0, 1])) == Served(drafts=3, accepted=3)


def test_a_head_reads_its_own_embedding(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches `evaluate` judging a head with the target's embedding where serving takes the head's own (scenario 69)."""
    config, growth, examples = head_config(toy_folder, 1), DynamicGrowth(size=9, depth=4, top_k=3), toy_examples[:3]
    own = random_head(replace(config, own_embedding=True))
    assert own.embed_tokens is not None
    same = random_head(config)
    same.load_state_dict({name: weight for name, weight in own.state_dict().items() if name != "embed_tokens.weight"})
    other = replace(toy_words, embedding=own.embed_tokens.weight)
    assert serve(own, examples, toy_words, growth) == serve(same, examples, other, growth)
    trees, right = (draft_everywhere(head, examples[0], words, growth) for head, words in ((own, toy_words), (same, other)))
    assert [tree.nodes for tree in trees] == [tree.nodes for tree in right]
    wrong = draft_everywhere(same, examples[0], toy_words, growth)
    assert [tree.nodes for tree in trees] != [tree.nodes for tree in wrong]
    assert chain_acceptance(own, examples, toy_words) == chain_acceptance(same, examples, other)

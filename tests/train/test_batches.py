from __future__ import annotations

import itertools

import torch

from vllm_eagle.train.batches import Sampler, pack, split, usable
from vllm_eagle.train.features import Example


def _example(prompt: int, answer: int, base: int = 0) -> Example:
    """Number everything: token i is base+i, its feature is filled with base+i, candidates name the token they guide."""
    length = prompt + answer
    tokens = torch.arange(base, base + length)
    features = tokens[:-1, None].half().expand(-1, 4)
    return Example(tokens, features, tokens[prompt:, None], torch.ones(answer, 1))


def test_rows_line_up() -> None:
    """Catches tokens, features, positions or candidates shifted against each other, or rounds that cross sequences."""
    batch = pack([_example(3, 4), _example(2, 3, base=100)])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 101, 102, 103]
    assert batch.features[:, 0].tolist() == [0, 1, 2, 3, 4, 100, 101, 102]
    assert batch.guides[:, 0].tolist() == [1, 2, 3, 4, 5, 101, 102, 103]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.start.tolist() == [2, 3, 4, 6, 7]  # slots P-1 … T-3
    assert batch.chosen.tolist() == batch.top_ids[:, 0].tolist() == [4, 5, 6, 103, 104]
    assert batch.left.tolist() == [3, 2, 1, 2, 1]


def test_order_follows_from_seed_and_step_alone() -> None:
    """Catches a resumed run that sees other data, and an epoch that repeats or loses an example."""
    examples = [_example(2, 3 + i % 4, base=10 * i) for i in range(20)]
    sampler = Sampler(examples, batch_rounds=10, seed=5)
    straight = [batch.tokens.tolist() for batch in itertools.islice(sampler.from_step(0), 25)]
    resumed = [batch.tokens.tolist() for batch in itertools.islice(sampler.from_step(17), 8)]
    assert straight[17:] == resumed
    for number in (0, 1):
        assert sorted(itertools.chain(*sampler.epoch(number))) == list(range(20))
    assert sampler.epoch(0) != sampler.epoch(1)


def test_answers_of_a_prompt_stay_on_one_side() -> None:
    """Catches held-out figures that are really training figures."""
    examples = [_example(5, 2 + i % 3, base=17 * (i // 3)) for i in range(300)]
    train, held = split(examples, 20)
    prompts = [{tuple(e.tokens[:5].tolist()) for e in side} for side in (train, held)]
    assert not prompts[0] & prompts[1]
    assert 20 < len(held) < 120


def test_an_answer_of_one_token_has_no_round() -> None:
    """Catches an empty batch or a negative length from a very short answer."""
    assert [usable(_example(4, 1)), usable(_example(1, 2))] == [False, True]

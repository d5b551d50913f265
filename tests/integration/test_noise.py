"""Shared noise in the engine: more drafts accepted at temperature > 0, and the same law of what is written (scenario 11)."""

from __future__ import annotations

from collections import Counter
from math import exp

import pytest
from vllm import LLM, SamplingParams

from tests.integration.harness import counters, engine, generate, prompts, runner_of, since
from vllm_eagle import speculate
from vllm_eagle.testing import tiny_head, tiny_target

VOCAB = 40


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target(folder / "target", vocab=VOCAB, damping=0.002)
    head = tiny_head(folder / "head", vocab=VOCAB, copies=True)
    options = {"max_num_seqs": 128, "max_logprobs": VOCAB}
    return engine(target, **options), engine(target, **options, **speculate(head, tree_size=6, tree_depth=3, tree_top_k=3))


def accepted(llm: LLM, params: list[SamplingParams], shares: bool) -> tuple[list[list[int]], float]:
    """Return what is written and the accepted drafts of a step."""
    runner = runner_of(llm)
    usual, runner._shares_noise = runner._shares_noise, shares
    before = counters(llm)
    written = generate(llm, prompts([5 + i for i in range(len(params))], VOCAB), params)
    seen = since(before, counters(llm))
    runner._shares_noise = usual
    return written, seen["accepted_tokens"] / seen["drafts"]


def test_more_is_accepted_and_nothing_else_changes(engines: tuple[LLM, LLM]) -> None:
    """Catches noise read for another token, request or level: it would then help no more than no noise."""
    plain, tree = engines
    params = [SamplingParams(temperature=[0.8, 1.2][i % 2], seed=i, max_tokens=60, ignore_eos=True) for i in range(16)]
    want = generate(plain, prompts([5 + i for i in range(16)], VOCAB), params)
    without, few = accepted(tree, params, shares=False)
    with_noise, many = accepted(tree, params, shares=True)
    assert without == with_noise == want
    assert many > 1.25 * few


def test_unseeded_requests_are_drawn_from_the_targets_law(engines: tuple[LLM, LLM]) -> None:
    """Catches a generator shared by requests, started alike or peeked at: the pairs of first tokens, by chi-square."""
    plain, tree = engines
    (prompt,), count = prompts([9], VOCAB), 2500
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    before = counters(tree)
    pairs = Counter(tuple(ids[:2]) for ids in generate(tree, [prompt] * count, params))
    assert since(before, counters(tree))["accepted_tokens"] > count // 3
    first = law(plain, [prompt])[0]
    second = law(plain, [[*prompt, token] for token in range(VOCAB)])
    statistic, cells, rest = 0.0, 0, [0.0, 0.0]
    for a in range(VOCAB):
        for b in range(VOCAB):
            expected = count * first[a] * second[a][b]
            if expected < 5:
                rest = [rest[0] + expected, rest[1] + pairs[a, b]]
            else:
                statistic, cells = statistic + (pairs[a, b] - expected) ** 2 / expected, cells + 1
    statistic += (rest[1] - rest[0]) ** 2 / rest[0]
    assert cells > 15
    assert statistic < cells + 5 * (2 * cells) ** 0.5  # five standard deviations


def law(llm: LLM, texts: list[list[int]]) -> list[list[float]]:
    """Return the target's next-token probabilities after each text."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB, ignore_eos=True)
    outs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    return [[exp(out.outputs[0].logprobs[0][token].logprob) for token in range(VOCAB)] for out in outs]

"""Whatever the scheduler does to a tree, the ids stay: chunked prefill, cut trees, preemption, the length limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.integration.harness import counters, engine, generate, greedy, preemptions, prompts, runner_of, since
from vllm_eagle import speculate
from vllm_eagle.testing import Half, Oracle

LENGTHS = [5, 120, 33, 90, 64, 7]
TOKENS = 30


@pytest.fixture(scope="module")
def base(target: str) -> LLM:
    return engine(target)


@pytest.fixture(scope="module")
def outputs(base: LLM) -> list[list[int]]:
    return generate(base, prompts(LENGTHS), greedy(TOKENS + 10))


@pytest.fixture(scope="module")
def texts(outputs: list[list[int]]) -> list[list[int]]:
    return [prompt + out for prompt, out in zip(prompts(LENGTHS), outputs, strict=True)]


def with_oracle(target: str, head: str, texts: list[list[int]], width: int = 3, **options: Any) -> LLM:
    llm = engine(target, **speculate(head, tree_size=20, tree_depth=4, tree_top_k=4), **options)
    runner = runner_of(llm)
    runner.drafter.drafter = Half(
        runner.drafter.drafter,
        runner.drafter.growth,
        texts=texts,
        depth=4,
        width=width,
        sibling=width - 1,
        right_depth=[4, 2, 0, 3],
    )
    return llm


def test_chunked_prefill_beside_trees(
    base: LLM, target: str, head: str, texts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Catches plain rows and tree rows mixed up in one forward pass, and trees cut by a small token budget."""
    llm = with_oracle(target, head, texts, max_num_batched_tokens=32, max_num_seqs=6)
    assert generate(llm, prompts(LENGTHS), greedy(TOKENS)) == [out[:TOKENS] for out in outputs]
    # seeded requests whose prompt comes in chunks crash plain vLLM on CPU: a discarded draw cannot be rewound there
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(len(LENGTHS))]
    assert generate(llm, prompts(LENGTHS), params) == generate(base, prompts(LENGTHS), params)


def test_preemption(target: str, head: str, texts: list[list[int]], outputs: list[list[int]]) -> None:
    """Catches a tree of before the preemption verified after it, and slots outside the request's own blocks."""
    llm = with_oracle(target, head, texts, num_gpu_blocks_override=14, max_num_seqs=6, max_model_len=160)
    before = preemptions(llm)
    assert generate(llm, prompts(LENGTHS), greedy(TOKENS)) == [out[:TOKENS] for out in outputs]
    assert preemptions(llm) > before
    assert runner_of(llm)._trees.keys() <= runner_of(llm).requests.keys()


def test_drafts_go_before_requests(target: str, head: str, texts: list[list[int]], outputs: list[list[int]]) -> None:
    """Catches a request preempted for another's guesses in a pool that holds both without them (scenario 30)."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 7, "max_model_len": 192}  # 3 blocks each, and vLLM's null block
    llm = engine(target, **options, **speculate(head, tree_size=40, tree_depth=5, tree_top_k=8))
    runner = runner_of(llm)
    runner.drafter.drafter = Oracle(runner.drafter.drafter, runner.drafter.growth, texts=texts, depth=5, width=7, sibling=3)
    asked, limits = [prompts(LENGTHS)[r] for r in (4, 2)], (32, 40)  # 96 and 73 tokens at their end
    assert generate(llm, asked, [greedy(limit) for limit in limits]) == [outputs[4][:32], outputs[2][:40]]
    assert preemptions(llm) == 0
    assert counters(llm)["accepted_tokens"] > 20


def test_prefix_cache(target: str, head: str, texts: list[list[int]], outputs: list[list[int]]) -> None:
    """Catches a rejected token's K/V published in a block that a later request reuses."""
    llm = with_oracle(target, head, texts, enable_prefix_caching=True)
    for _ in range(2):
        assert generate(llm, prompts(LENGTHS), greedy(TOKENS)) == [out[:TOKENS] for out in outputs]
    longer = [text[: length + 20] for text, length in zip(texts, LENGTHS, strict=True)]  # hits blocks written by trees
    assert generate(llm, longer, greedy(10)) == [out[20:30] for out in outputs]


def test_drafts_nobody_proposed(base: LLM, target: str, head: str, outputs: list[list[int]], texts: list[list[int]]) -> None:
    """Catches drafts changed on their way through the scheduler verified under a structure that is not theirs."""
    llm = with_oracle(target, head, texts)
    runner = runner_of(llm)
    take = runner.take_draft_token_ids

    def forgetful() -> Any:
        drafts = take()
        runner._trees.clear()
        return drafts

    runner.take_draft_token_ids = forgetful
    assert generate(llm, prompts(LENGTHS), greedy(TOKENS)) == [out[:TOKENS] for out in outputs]


LIMIT = 64


@pytest.fixture(scope="module")
def limited(target: str, head: str) -> LLM:
    return engine(target, **speculate(head, tree_size=17, tree_depth=6, tree_top_k=3), max_model_len=LIMIT)


@pytest.mark.parametrize("short", [1, 2, 3, 5, 9])
def test_length_limit_to_the_token(base: LLM, limited: LLM, short: int) -> None:
    """Catches a request that passes max_model_len, or ends early, with drafts in hand."""
    asked = prompts([LIMIT - short, 10])
    want = [generate(base, [prompt], greedy(LIMIT - len(prompt)))[0] for prompt in asked]
    runner = runner_of(limited)
    oracle = Oracle(
        None,
        runner.drafter.growth,
        texts=[prompt + out + [5] * 9 for prompt, out in zip(asked, want, strict=True)],
        depth=4,
        width=2,
        sibling=1,
    )
    for drafter in (runner.drafter.drafter, oracle):
        usual, runner.drafter.drafter = runner.drafter.drafter, drafter
        before = counters(limited)
        outs = limited.generate([{"prompt_token_ids": p} for p in asked], greedy(LIMIT), use_tqdm=False)
        runner.drafter.drafter = usual
        assert [list(out.outputs[0].token_ids) for out in outs] == want
        assert {out.outputs[0].finish_reason for out in outs} == {"length"}
    assert since(before, counters(limited))["accepted_tokens"] > 20  # the oracle's turn


@pytest.fixture(scope="module")
def up_to_the_limit(base: LLM) -> list[tuple[list[int], list[int]]]:
    """Prompts of every length that leaves room, and plain decoding to the limit."""
    asked = prompts(list(range(1, LIMIT)))
    return list(zip(asked, generate(base, asked, [greedy(LIMIT - len(prompt)) for prompt in asked]), strict=True))


@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("lengths", [range(1, LIMIT), [LIMIT - 1], [LIMIT - 4, 3, 5, 8]], ids=["all", "alone", "neighbours"])
def test_35_every_prompt_length_at_every_depth(
    limited: LLM, up_to_the_limit: list[tuple[list[int], list[int]]], depth: int, lengths: Sequence[int]
) -> None:
    """Catches an index past the last position, for the request at its limit or its neighbours (scenario 35)."""
    drafter, texts = runner_of(limited).drafter, [prompt + out + [5] * 9 for prompt, out in up_to_the_limit]
    usual, drafter.drafter = drafter.drafter, Oracle(None, drafter.growth, texts=texts, depth=depth, width=2, sibling=1)
    asked = [up_to_the_limit[length - 1] for length in lengths]
    outs = limited.generate([{"prompt_token_ids": prompt} for prompt, _ in asked], greedy(1000), use_tqdm=False)
    drafter.drafter = usual
    assert [list(out.outputs[0].token_ids) for out in outs] == [want for _, want in asked]
    assert {out.outputs[0].finish_reason for out in outs} == {"length"}

"""A real model with the shipped head through all that a server does to it; tiny models prove each of these in the suite.

Slow. The drafts are a real head's: some right, most of them not, never the same number twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.integration.harness import core_of, counters, engine, generate, greedy, preemptions, since, token_budget, watching
from vllm_eagle import speculate
from vllm_eagle.demo.model import demo_model
from vllm_eagle.train.target import Target

pytestmark = pytest.mark.slow

LIMIT = 320
SYSTEM = (
    "You are the assistant of a small public library. Answer in plain words, in full sentences, and stay friendly. When a "
    "reader asks for a list, number it. When a reader asks for code, write it in Python and add a short remark on how to "
    "run it. Never invent books."
)
QUESTIONS = [
    "Which three habits help a child to enjoy reading?",
    "Write a short story about a bookshop that is open only at night.",
    "How do I count the words of a text file?",
    "Why do old books smell the way they do?",
    "Draft an invitation to a poetry evening next Friday.",
    "Explain what an index is good for.",
    "List five things to do with a book that nobody wants any more.",
    "What is the difference between a novel and a novella?",
]


@pytest.fixture(scope="module")
def base() -> LLM:
    """Plain decoding, undisturbed."""
    return engine(str(demo_model()), max_model_len=LIMIT, max_num_batched_tokens=2048)


def with_head(repository: Path, **options: Any) -> LLM:
    head = str(repository / "examples" / "heads" / "smollm2-135m-eagle1")
    trees = speculate(head, tree_size=12, tree_depth=4, tree_top_k=4)
    return engine(str(demo_model()), max_model_len=LIMIT, **trees, **options)


@pytest.fixture(scope="module")
def crowded(repository: Path, base: LLM) -> LLM:  # after `base`: the metrics are those of the engine made last
    """Trees in a pool of two and a half whole requests, with the prefix cache on and prompts in chunks."""
    return with_head(repository, num_gpu_blocks_override=26, max_num_batched_tokens=160, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def asked(base: LLM) -> list[list[int]]:
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS]
    return base.get_tokenizer().apply_chat_template(chats, add_generation_prompt=True, return_dict=False)  # type: ignore[no-any-return]


def params(tokens: int) -> list[SamplingParams]:
    """Return parameters of every second request greedy, the others seeded."""
    return [
        SamplingParams(temperature=0.8 * (r % 2), top_p=0.95, seed=r, max_tokens=tokens, ignore_eos=True)
        for r in range(len(QUESTIONS))
    ]


@pytest.fixture(scope="module")
def want(base: LLM, asked: list[list[int]]) -> list[list[int]]:
    return generate(base, asked, params(150))


def free_blocks(llm: LLM) -> int:
    return core_of(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()  # type: ignore[no-any-return]


def test_a_pool_too_small_for_all(crowded: LLM, asked: list[list[int]], want: list[list[int]]) -> None:
    """Catches a tree, a state or K/V that survives a preemption, a chunk border or a hit (scenarios 19, 25, 30, 32)."""
    free, before, stopped = free_blocks(crowded), counters(crowded), preemptions(crowded)
    for _ in range(2):  # the second time with prefix hits
        assert generate(crowded, asked, params(150)) == want
    assert preemptions(crowded) > stopped
    assert since(before, counters(crowded))["accepted_tokens"] > 100
    assert free_blocks(crowded) == free


def drafted(llm: LLM, prompt: list[int], tokens: int) -> tuple[list[int], list[list[int]]]:
    """Return the text, and the tokens of every tree drafted; in the middle of a prompt there is a root alone."""
    trees: list[list[int]] = []
    with watching(llm, lambda known, made: trees.extend(tree.tokens.tolist() for tree in made)):
        (text,) = generate(llm, [prompt], greedy(tokens))
    return text, [tree for tree in trees if len(tree) > 1]


def test_drafts_hang_on_neither_hits_nor_chunks(crowded: LLM, base: LLM, asked: list[list[int]]) -> None:
    """Catches a head that reads the wrong token at a chunk border, or does without a cached prefix (scenarios 19, 21, 25)."""
    assert crowded.reset_prefix_cache()
    text, cold = drafted(crowded, asked[0], 60)
    assert [text] == generate(base, asked[:1], greedy(60))
    assert drafted(crowded, asked[0], 60) == (text, cold)  # with a hit
    for budget in (13, 37, 64):
        assert crowded.reset_prefix_cache()
        with token_budget(crowded, budget):
            again, chunked = drafted(crowded, asked[0], 60)
        assert again == text
        assert chunked == cold


@pytest.mark.parametrize("room", [1, 2, 4, 5])
def test_the_limit(crowded: LLM, base: LLM, asked: list[list[int]], room: int) -> None:
    """Catches a request that passes the limit, or ends early, with drafts in hand (scenario 35)."""
    long = [(prompt * 9)[: LIMIT - room] for prompt in asked[:2]]
    tokens = [greedy(room), greedy(room), greedy(40)]
    outs = crowded.generate(
        [{"prompt_token_ids": p} for p in (*long, asked[2])], [greedy(999)] * 2 + tokens[2:], use_tqdm=False
    )
    assert [list(out.outputs[0].token_ids) for out in outs] == generate(base, [*long, asked[2]], tokens)
    assert {out.outputs[0].finish_reason for out in outs} == {"length"}


def test_aborts(crowded: LLM, asked: list[list[int]], want: list[list[int]]) -> None:
    """Catches a neighbour changed, or a block kept, by a request that goes away with drafts in flight (scenario 86)."""
    free, engine_ = free_blocks(crowded), crowded.llm_engine
    for r, (prompt, one) in enumerate(zip(asked, params(100), strict=True)):
        engine_.add_request(str(r), {"prompt_token_ids": prompt}, one)
    found: dict[str, Sequence[int]] = {}
    step = 0
    while engine_.has_unfinished_requests():
        found |= {out.request_id: out.outputs[0].token_ids for out in engine_.step()}
        step += 1
        if step in (3, 8, 20):
            engine_.abort_request([str(step % 7)])  # 3, 1 and 6
    for r in (0, 2, 4, 5, 7):
        assert list(found[str(r)]) == want[r][:100]
    for r in (3, 1, 6):
        assert list(found.get(str(r), [])) == want[r][: len(found.get(str(r), []))]
    assert free_blocks(crowded) == free


def test_compiled_at_every_batch_size(repository: Path, base: LLM, asked: list[list[int]]) -> None:
    """Catches buffers that compiled code reuses before the accepted rows are committed (scenario 10)."""
    compiled = with_head(repository, enforce_eager=False)
    before = counters(compiled)
    for batch in range(1, len(asked) + 1):
        some = params(32)[:batch]
        assert generate(compiled, asked[:batch], some) == generate(base, asked[:batch], some)
    assert since(before, counters(compiled))["accepted_tokens"] > 100


def test_bfloat16_differs_at_ties_alone(repository: Path, asked: list[list[int]]) -> None:
    """Catches a tree whose rows see other keys, hidden behind the rounding of 16 bits, through 30 layers.

    Where two texts part, float32 after their common prefix must hold both tokens to be within eight units in the last place
    of a bfloat16 as large as the best logit: what two orders of adding may make of one another.
    """
    rows, tokens = params(48), 48
    for row in rows:
        row.temperature = 0.0
    plain = engine(str(demo_model()), max_model_len=LIMIT, max_num_batched_tokens=2048, dtype="bfloat16")
    want = generate(plain, asked, rows)
    del plain
    trees = with_head(repository, dtype="bfloat16")
    got = generate(trees, asked, rows)
    assert counters(trees)["accepted_tokens"] > 50
    exact, together = Target.load(demo_model(), dtype=torch.bfloat16), 0
    exact.model.float()
    for prompt, mine, theirs in zip(asked, got, want, strict=True):
        at = next((i for i in range(tokens) if mine[i] != theirs[i]), tokens)
        together += at
        if at < tokens:
            logits = exact.logits(exact.features([prompt + mine[:at]])[0][-1:])[0]
            best = float(logits.max())
            assert best - float(logits[[mine[at], theirs[at]]].min()) < 8 * 2.0 ** (math.floor(math.log2(best)) - 7)
    assert together > 0.3 * tokens * len(asked)

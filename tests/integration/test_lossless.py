"""Ids with trees equal ids without, and exactly as many nodes are accepted as the drafter deserves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.integration.harness import cached, counters, engine, generate, greedy, prompts, runner_of, since
from vllm_eagle import speculate
from vllm_eagle.testing import Half, Hostile, Oracle

LENGTHS = [5, 31, 32, 33, 64, 95, 7, 120, 50]
TOKENS = 41


@pytest.fixture(scope="module")
def base(target: str) -> LLM:
    return engine(target)


@pytest.fixture(scope="module")
def tree(base: LLM, target: str, head: str) -> LLM:
    # after `base`: vLLM's counters belong to the engine made last
    return engine(target, **speculate(head, tree_size=63, tree_depth=5, tree_top_k=8))


@pytest.fixture(scope="module", autouse=True)
def head_drafter(tree: LLM) -> Any:
    """The real drafter, fetched before any test puts a double in its place."""
    return runner_of(tree).drafter.drafter


@pytest.fixture(scope="module")
def texts(base: LLM) -> list[list[int]]:
    """Whole texts that plain decoding writes, longer than any run below."""
    asked = prompts(LENGTHS)
    return [prompt + out for prompt, out in zip(asked, generate(base, asked, greedy(TOKENS + 16)), strict=True)]


def use(llm: LLM, drafter: Any) -> None:
    runner_of(llm).drafter.drafter = drafter


def growth(llm: LLM) -> Any:
    return runner_of(llm).drafter.growth


def want(texts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return [text[length : length + TOKENS] for text, length in zip(texts, lengths, strict=True)]


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 8), (2, 3), (4, 3), (5, 1), (7, 2), (7, 8)])
def test_oracle_is_accepted_in_full_at_every_sibling(tree: LLM, texts: list[list[int]], depth: int, width: int) -> None:
    """Catches K/V, positions or paths read as if the accepted nodes were the first rows (scenarios 1 and 5)."""
    asked = prompts(LENGTHS)
    for sibling in range(width):
        use(tree, Oracle(None, growth(tree), texts=texts, depth=depth, width=width, sibling=sibling))
        before = counters(tree)
        assert generate(tree, asked, greedy(TOKENS)) == want(texts, LENGTHS)
        seen = since(before, counters(tree))
        # the first token comes from the prompt; each step then emits the whole depth and one more
        steps, rest = divmod(TOKENS - 1, depth + 1)
        expected = len(asked) * (steps + (rest > 0))
        assert seen["drafts"] == expected
        assert seen["accepted_tokens_per_pos"][:depth] == [expected] * depth


@pytest.mark.parametrize("batch", [1, 2, 5, 9])
def test_half_right_trees_accept_exactly_their_right_part(tree: LLM, texts: list[list[int]], batch: int) -> None:
    """Catches a wrong accepted length when requests of a batch stop at different levels (scenario 2)."""
    asked = prompts(LENGTHS)[:batch]
    for right_depth in [0, 1, 3, [0, 2, 1, 3]]:
        use(tree, Half(None, growth(tree), texts=texts, depth=4, width=3, sibling=1, right_depth=right_depth))
        before = counters(tree)
        assert generate(tree, asked, greedy(TOKENS)) == want(texts, LENGTHS)[:batch]
        seen = since(before, counters(tree))
        if isinstance(right_depth, int):
            expected = batch * -(-(TOKENS - 1) // (right_depth + 1))
            assert seen["drafts"] == expected
            assert seen["accepted_tokens_per_pos"][:4] == [expected * (level < right_depth) for level in range(4)]


def test_hostile_trees_change_nothing(tree: LLM, texts: list[list[int]]) -> None:
    """Catches EOS, banned or right-but-misplaced tokens slipping in because they were drafted (scenario 6)."""
    use(tree, Hostile(None, growth(tree), texts=texts, depth=5, width=6, tokens=[1, 0, 2]))
    assert generate(tree, prompts(LENGTHS), greedy(TOKENS)) == want(texts, LENGTHS)
    stopping = SamplingParams(temperature=0, max_tokens=TOKENS)
    bad = SamplingParams(temperature=0, max_tokens=TOKENS, bad_words=[f"w{texts[0][LENGTHS[0] + 1]}"])
    plain = engine_outputs(tree, stopping), engine_outputs(tree, bad)
    use(tree, Half(None, growth(tree), texts=texts, depth=1, width=1, sibling=0, right_depth=0))
    assert plain == (engine_outputs(tree, stopping), engine_outputs(tree, bad))


def engine_outputs(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return generate(llm, prompts(LENGTHS), params)


@pytest.mark.parametrize("offset", range(0, 32, 5))
def test_every_offset_of_a_block(base: LLM, tree: LLM, offset: int) -> None:
    """Catches slots computed wrongly where accepted tokens cross into the next block."""
    asked = prompts([40 + offset, 72 + offset])
    outs = generate(base, asked, greedy(TOKENS + 8))
    whole = [prompt + out for prompt, out in zip(asked, outs, strict=True)]
    use(tree, Oracle(None, growth(tree), texts=whole, depth=4, width=3, sibling=2))
    assert generate(tree, asked, greedy(TOKENS)) == [out[:TOKENS] for out in outs]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_seeded_sampling(base: LLM, tree: LLM, head_drafter: Any, temperature: float) -> None:
    """Catches random draws consumed by drafts, by rejected nodes or by other requests of the batch."""
    asked = prompts(LENGTHS)
    params = [
        SamplingParams(
            temperature=temperature if i % 3 else 0, seed=i, max_tokens=TOKENS, ignore_eos=True, top_p=0.9 if i % 2 else 1
        )
        for i in range(len(asked))
    ]
    outs = generate(base, asked, params)
    whole = [prompt + out for prompt, out in zip(asked, outs, strict=True)]
    for drafter in (Oracle(None, growth(tree), texts=whole, depth=4, width=3, sibling=1), head_drafter):
        use(tree, drafter)
        assert generate(tree, asked, params) == outs
    use(tree, Half(None, growth(tree), texts=whole, depth=4, width=3, sibling=1, right_depth=[3, 0, 2]))
    assert generate(tree, asked[:4], params[:4]) == outs[:4]


def test_committed_cache_equals_a_fresh_prefill(tree: LLM, head_drafter: Any, texts: list[list[int]]) -> None:
    """Catches rejected rows left in the cache, accepted rows in the wrong slot, guessed features in head K/V (scenario 1)."""
    for sibling in (0, 2):
        use(tree, Half(head_drafter, growth(tree), texts=texts, depth=4, width=3, sibling=sibling, right_depth=[4, 1, 0, 3]))
        asked = prompts(LENGTHS)
        for r, prompt in enumerate(asked):
            tree.llm_engine.add_request(f"run{r}", {"prompt_token_ids": prompt}, greedy(TOKENS))
        for _ in range(8):
            tree.llm_engine.step()
        found = {}
        for request in list(runner_of(tree).requests):
            batch = runner_of(tree).input_batch
            count = int(batch.num_tokens_no_spec[batch.req_id_to_index[request]])
            # the last token has not been through the model yet; the one before is the head's last certain pair
            found[int(request[3])] = (count, cached(tree, request, count - 1))
        abort(tree)
        for r, (count, after) in found.items():
            assert count > LENGTHS[r] + 8
            fresh = prefill(tree, texts[r][:count])
            assert any(name.startswith("eagle_head") for name in after)
            for name, pair in after.items():
                for got, want in zip(pair, fresh[name], strict=True):  # relative to the layer's largest number
                    assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1), name


def prefill(llm: LLM, text: list[int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the cache of all but the last token right after a fresh prefill."""
    llm.llm_engine.add_request("fresh", {"prompt_token_ids": text}, greedy(3))
    llm.llm_engine.step()
    (request,) = runner_of(llm).requests
    found = cached(llm, request, len(text) - 1)
    abort(llm)
    return found


def abort(llm: LLM) -> None:
    llm.llm_engine.abort_request([request.split("-")[0] for request in runner_of(llm).requests])
    generate(llm, [[5]], greedy(1))  # one more step, so that the runner hears of it


def test_every_request_its_own_parameters(base: LLM, tree: LLM) -> None:
    """Catches history read without the accepted ancestors: penalties, bad words, min_tokens and logprobs in one batch."""
    asked = prompts(LENGTHS[:8])
    common: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, presence_penalty=1.5, **common),
        SamplingParams(temperature=0, frequency_penalty=1.2, logprobs=3, **common),
        SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.4, **common),
        SamplingParams(temperature=0, bad_words=["w5 w9", "w7", "w30 w31 w32"], **common),
        SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=20, stop_token_ids=list(range(2, 120))),
        SamplingParams(temperature=1.1, seed=5, top_k=20, logprobs=2, **common),
        SamplingParams(temperature=0, allowed_token_ids=list(range(40, 90)), **common),
        SamplingParams(temperature=0, **common),
    ]
    want = base.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    texts = [p + list(out.outputs[0].token_ids) for p, out in zip(asked, want, strict=True)]
    use(tree, Half(None, growth(tree), texts=texts, depth=4, width=3, sibling=2, right_depth=[4, 2, 0, 3]))
    got = tree.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    for a, b in zip(want, got, strict=True):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
        assert (a.outputs[0].finish_reason, a.outputs[0].stop_reason) == (b.outputs[0].finish_reason, b.outputs[0].stop_reason)
        if a.outputs[0].logprobs is None:
            continue
        for at, (x, y) in enumerate(zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True)):
            assert x.keys() == y.keys(), at
            for token in x:
                assert x[token].logprob == pytest.approx(y[token].logprob, abs=1e-4)
                assert x[token].rank == y[token].rank

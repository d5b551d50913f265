"""What the head remembers: its K/V is that of the target's own features, whatever chunks, cache hits and batches do.

The text stays right when this is wrong; only fewer tokens are accepted. So accepted counts are compared, step by step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import LLM

from tests.integration.harness import (
    cached,
    counters,
    drafting,
    engine,
    generate,
    greedy,
    prompts,
    runner_of,
    since,
    token_budget,
    trace,
    trained_like,
)
from vllm_eagle import speculate
from vllm_eagle.drafting import Drafter
from vllm_eagle.drafting.reference import _causal
from vllm_eagle.heads import load_head
from vllm_eagle.testing import Half, Oracle

pytestmark = pytest.mark.usefixtures("full_precision")

TREE = {"tree_size": 12, "tree_depth": 4, "tree_top_k": 3}
Layers = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return trained_like(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def base(models: tuple[str, str]) -> LLM:
    return engine(models[0])


@pytest.fixture(scope="module")
def tree(base: LLM, models: tuple[str, str]) -> LLM:
    return engine(models[0], **speculate(models[1], **TREE))


@pytest.fixture(scope="module")
def caching(base: LLM, models: tuple[str, str]) -> LLM:
    return engine(models[0], enable_prefix_caching=True, num_gpu_blocks_override=120, **speculate(models[1], **TREE))


def head_layers(llm: LLM, request: str, tokens: int) -> Layers:
    return {name: pair for name, pair in cached(llm, request, tokens).items() if name.startswith("eagle_head")}


def assert_close(found: Layers, want: Layers, tokens: int) -> None:
    assert found.keys() == want.keys() and found
    for name, pair in found.items():
        for got, one in zip(pair, want[name], strict=True):  # relative to the layer's largest number
            assert len(got) == tokens
            assert (got - one[:tokens]).abs().max() <= 1e-5 * one.abs().max().clamp(min=1), name


@torch.inference_mode()
def head_from_scratch(models: tuple[str, str], text: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the head's keys and values of every position, layer by layer: transformers' states, one pass, no engine."""
    target, head = AutoModelForCausalLM.from_pretrained(models[0]).float().eval(), load_head(models[1])
    features = target.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    made: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made.append((key, value))
        return _causal(layer, query, key, value)

    head(target.model.embed_tokens(torch.tensor(text[1:])), features, torch.arange(len(features)), attend)
    return made


@pytest.mark.parametrize("width", [1, 3])
def test_14_head_kv_is_of_the_targets_features_after_every_step(
    base: LLM, tree: LLM, models: tuple[str, str], width: int
) -> None:
    """Catches a guessed feature, or one of another row, left in the head's K/V of an accepted token (scenario 14)."""
    asked = prompts([5, 33, 64, 17, 90, 31])
    texts = [prompt + out for prompt, out in zip(asked, generate(base, asked, greedy(40)), strict=True)]
    wanted = [head_from_scratch(models, text) for text in texts]
    runner, compared = runner_of(tree), []
    proposer = runner.drafter
    shape: dict[str, Any] = {"texts": texts, "depth": 3, "width": width, "sibling": width - 1, "right_depth": [3, 1, 0, 2]}

    def compare(_: int) -> None:
        batch, starts = runner.input_batch, runner.query_start_loc.np
        for row, request in enumerate(batch.req_ids):
            through = int(batch.num_computed_tokens_cpu[row] + starts[row + 1] - starts[row])
            count = min(through, int(batch.num_tokens_no_spec[row]) - 1)
            found = head_layers(tree, request, count)
            assert_close(found, dict(zip(found, wanted[int(request.split("-")[0])], strict=True)), count)
            compared.append(count)

    with drafting(tree, Half(proposer.drafter, proposer.growth, **shape)), token_budget(tree, 80):
        ids, counts = trace(tree, asked, greedy(30), compare)
    assert ids == [text[len(prompt) :][:30] for prompt, text in zip(asked, texts, strict=True)]
    assert len(compared) > 50 and {1, 2, 3, 4} <= {count for one in counts for count in one}


def test_19_chunks_change_nothing(base: LLM, models: tuple[str, str]) -> None:
    """Catches the model's guess where the prompt's own next token belongs, at the end of a chunk (scenario 19)."""
    asked = prompts([300])
    want, first = generate(base, asked, greedy(20)), None
    for budget in (2048, 64, 33, 32):
        llm = engine(models[0], max_num_batched_tokens=budget, max_num_seqs=2, **speculate(models[1], **TREE))
        runner, steps = runner_of(llm), []
        llm.llm_engine.add_request("0", {"prompt_token_ids": asked[0]}, greedy(20))
        while not steps or steps[-1] < 301:
            llm.llm_engine.step()
            steps.append(int(runner.input_batch.num_tokens_no_spec[0]))
        assert len(steps) == -(-300 // budget)
        (request,) = runner.input_batch.req_ids
        drafted = runner._trees[request]
        found = head_layers(llm, request, 300), drafted.tokens.tolist(), drafted.parents.tolist()
        first = first or found
        assert_close(found[0], first[0], 300)
        assert found[1:] == first[1:]
        assert drafted.size == TREE["tree_size"]
        while llm.llm_engine.has_unfinished_requests():
            (out,) = llm.llm_engine.step()
        assert list(out.outputs[0].token_ids) == want[0]


@pytest.mark.parametrize("budget", [64, 2048])
@pytest.mark.parametrize("copies", [2, 4, 8])
def test_23_equal_prompts_in_one_step(base: LLM, caching: LLM, budget: int, copies: int) -> None:
    """Catches K/V, the target's or the head's, of a block that another request of the step has yet to write (scenario 23)."""
    (prompt,) = prompts([150])
    want = generate(base, [prompt], greedy(16))[0]
    runner, alone, checked = runner_of(caching), {}, []

    def remember(_: int) -> None:
        (request,) = runner.input_batch.req_ids
        count = int(runner.input_batch.num_tokens_no_spec[0]) - 1
        if count >= 150:
            alone.update(head_layers(caching, request, count))

    def compare(_: int) -> None:
        batch = runner.input_batch
        for row, request in enumerate(batch.req_ids):
            count = min(int(batch.num_tokens_no_spec[row]) - 1, len(next(iter(alone.values()))[0]))
            if count >= 150 and int(batch.num_computed_tokens_cpu[row]) >= 150:
                assert_close(head_layers(caching, request, count), alone, count)
                checked.append(request)

    with token_budget(caching, budget):
        assert caching.reset_prefix_cache()
        one, steps = trace(caching, [prompt], greedy(16), remember)
        caching.llm_engine.step()
        assert caching.reset_prefix_cache()
        many, counts = trace(caching, [prompt] * copies, greedy(16), compare)
    assert one == [want] and many == [want] * copies
    if copies * (TREE["tree_size"] + 1) <= budget:  # else trees are cut to the budget
        assert counts == steps * copies
    assert len(set(checked)) == copies and max(steps[0]) > 1


@pytest.mark.parametrize("repeats", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_23_a_popular_prompt_is_accepted_as_on_the_first_day(caching: LLM, repeats: int) -> None:
    """Catches blocks that go bad while others come and go: acceptance that decays until a restart (scenario 23)."""
    (popular,) = prompts([150])
    churn = prompts([40 + r % 90 for r in range(2 * repeats)])
    assert caching.reset_prefix_cache()
    seen = []
    for r in range(repeats):
        params = [greedy(12), greedy(1), greedy(1)]
        ids, counts = trace(caching, [popular, churn[2 * r], popular[: 32 * (1 + r % 4)] + churn[2 * r + 1]], params)
        seen.append((ids[0], counts[0]))
    assert seen == [seen[0]] * repeats
    assert max(seen[0][1]) > 1


def test_25_a_second_pass_over_the_cache(base: LLM, tree: LLM, caching: LLM) -> None:
    """Catches a head that has no K/V of the tokens restored from the prefix cache (scenario 25)."""
    asked = prompts([33 + 5 * r for r in range(20)])[:20]
    params = [greedy(24)] * len(asked)
    ids, off = trace(tree, asked, params)
    assert ids == generate(base, asked, params)
    assert caching.reset_prefix_cache()
    for _ in range(2):
        outs = caching.generate([{"prompt_token_ids": p} for p in asked], greedy(1), use_tqdm=False)
    hits = [out.num_cached_tokens for out in outs]
    found, on = trace(caching, asked, params)
    assert sum(hits) >= 20 * 32  # each hit gives up its last block
    assert found == ids
    accepted, without = (sum(map(sum, counts)) / sum(map(len, counts)) for counts in (on, off))
    assert accepted >= 0.95 * without > 1.2


def test_26_conversations_keep_their_prefix(models: tuple[str, str]) -> None:
    """Catches more blocks held for a tree than its nodes take: they push out the prefixes of those who think (scenario 26)."""
    users, turns, answer = 4, 6, 20
    asked = prompts([20 + 7 * turn % 25 for turn in range(users * turns)])
    questions = [asked[user::users] for user in range(users)]
    final = [sum(map(len, question)) + answer * turns for question in questions]
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_seqs": 2}
    options["num_gpu_blocks_override"] = 1 + sum(-(-tokens // 32) for tokens in final)

    def talk(llm: LLM) -> tuple[list[list[int]], list[int]]:
        said: list[list[int]] = [[] for _ in range(users)]
        hits = []
        for turn in range(turns):
            for pair in ((0, 1), (2, 3)):  # while two are served, the other two read
                for user in pair:
                    said[user] += questions[user][turn]
                outs = llm.generate([{"prompt_token_ids": list(said[user])} for user in pair], greedy(answer), use_tqdm=False)
                for user, out in zip(pair, outs, strict=True):
                    said[user] += out.outputs[0].token_ids
                    hits.append(out.num_cached_tokens)
        return said, hits

    plain, want = talk(engine(models[0], **options))
    trees = speculate(models[1], **TREE)
    trees["speculative_config"]["disable_eagle_block_drop"] = True  # what a hit gives up is another scenario
    llm = engine(models[0], **options, **trees)
    before = counters(llm)
    said, hits = talk(llm)
    assert said == plain
    assert since(before, counters(llm))["accepted_tokens"] > users * turns * answer / 4
    assert max(abs(one - two) for one, two in zip(hits, want, strict=True)) <= 32
    assert sum(want) > users * turns * 32


@pytest.mark.parametrize("kind", ["head", "oracle", "half"])
def test_83_rows_that_move(base: LLM, tree: LLM, kind: str) -> None:
    """Catches a tree verified for the request that took over a row: accepted counts equal those of each alone (scenario 83)."""
    asked, tokens = prompts([5, 33, 64, 17, 90, 8, 31, 50]), [9, 41, 3, 26, 15, 33, 6, 20]
    params = [greedy(most) if r % 4 else greedy(most, min_tokens=2) for r, most in enumerate(tokens)]
    want = generate(base, asked, greedy(50))
    proposer = runner_of(tree).drafter
    shape: dict[str, Any] = {
        "texts": [p + out for p, out in zip(asked, want, strict=True)],
        "depth": 3,
        "width": 3,
        "sibling": 1,
    }
    drafter: Drafter = {
        "head": lambda: proposer.drafter,
        "oracle": lambda: Oracle(proposer.drafter, proposer.growth, **shape),
        "half": lambda: Half(proposer.drafter, proposer.growth, right_depth=[3, 1, 0, 2], **shape),
    }[kind]()
    rows: dict[str, set[int]] = defaultdict(set)

    def look(_: int) -> None:
        for request, row in runner_of(tree).input_batch.req_id_to_index.items():
            rows[request].add(row)

    with drafting(tree, drafter):
        alone = [trace(tree, [prompt], [one])[1][0] for prompt, one in zip(asked, params, strict=True)]
        ids, counts = trace(tree, asked, params, look)
    assert sum(len(seen) > 1 for seen in rows.values()) > 2
    assert ids == [out[:most] for out, most in zip(want, tokens, strict=True)]
    assert counts == alone
    assert sum(map(len, counts)) < sum(tokens)

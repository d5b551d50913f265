"""Speculation that cannot go on gives way: text is what plain decoding writes, and the next drafts are as good as ever."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.exceptions import VLLMValidationError

from tests.integration.harness import cached, counters, drafting, engine, generate, greedy, prompts, runner_of, since, watching
from vllm_eagle import speculate
from vllm_eagle.drafting import Drafter, HeadCache, Known
from vllm_eagle.integration import watch
from vllm_eagle.testing import Oracle, tiny_head
from vllm_eagle.tree import DraftTree

LENGTHS = [5, 70, 33, 18]
TOKENS = 40


@pytest.fixture(scope="module")
def base(folders: tuple[str, str]) -> LLM:
    return engine(folders[0])


@pytest.fixture(scope="module")
def tree(base: LLM, folders: tuple[str, str]) -> LLM:  # after the plain engine: counters are the last one's
    return engine(folders[0], **speculate(folders[1], tree_size=12, tree_depth=4, tree_top_k=3))


@pytest.fixture(scope="module")
def want(base: LLM) -> list[list[int]]:
    return generate(base, prompts(LENGTHS), greedy(TOKENS))


class Faulty:
    """Fail in chosen calls, before the head runs or right after its K/V went to scratch."""

    def __init__(self, inner: Drafter, fails: Any, late: bool = False) -> None:
        self.inner, self.fails, self.late, self.calls = inner, fails, late, 0

    def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
        self.calls += 1
        if self.fails(self.calls) and not self.late:
            raise RuntimeError("no drafts today")
        trees = self.inner.draft(known, cache)
        if self.fails(self.calls):
            raise RuntimeError("no drafts today")
        return trees


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    ours = logging.getLogger("vllm_eagle")
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)


@pytest.mark.parametrize("late", [False, True])
def test_a_failing_drafter_costs_its_steps_drafts(tree: LLM, want: list[list[int]], log: Any, late: bool) -> None:
    """Catches an engine that dies, a text that changes, and a log flooded by the same failure."""
    faulty = Faulty(runner_of(tree).drafter.drafter, lambda call: call % 3 != 0, late)
    before = counters(tree)
    with drafting(tree, faulty):
        assert generate(tree, prompts(LENGTHS), greedy(TOKENS)) == want
    counted = since(before, counters(tree))
    assert 0 < counted["drafts"] < faulty.calls * len(LENGTHS) / 2
    told = [record for record in log.records if "drafting failed" in record.getMessage()]
    assert len(told) == 1 and told[0].exc_info is not None
    assert told[0].getMessage().count("-") == len(LENGTHS)  # ids of requests are "number-suffix"
    assert not runner_of(tree)._failed - runner_of(tree).requests.keys()


def test_after_a_failure_the_head_reads_what_it_missed(tree: LLM, want: list[list[int]]) -> None:
    """Catches holes in the head's K/V, which would lower acceptance for the rest of the request, prompts in chunks included."""
    faulty = Faulty(runner_of(tree).drafter.drafter, lambda call: call in (1, 2, 4, 5))
    found = []
    for drafter in (faulty, faulty.inner):
        with drafting(tree, drafter):
            tree.llm_engine.add_request("x", {"prompt_token_ids": prompts(LENGTHS)[1]}, greedy(TOKENS))
            while True:
                tree.llm_engine.step()
                (request,) = runner_of(tree).requests
                batch = runner_of(tree).input_batch
                count = int(batch.num_tokens_no_spec[batch.req_id_to_index[request]])
                if count >= LENGTHS[1] + 12 and not len(runner_of(tree)._backlog):
                    break
        found.append((count, cached(tree, request, LENGTHS[1] + 11)))
        tree.llm_engine.abort_request(["x"])
        generate(tree, [[5]], greedy(1))
    assert faulty.calls > 5
    heads = [name for name in found[0][1] if name.startswith("eagle_head")]
    assert heads
    for name in heads:
        for got, wanted in zip(found[0][1][name], found[1][1][name], strict=True):
            assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1)


def test_off_for_one_request(tree: LLM, want: list[list[int]]) -> None:
    """Catches a request's wish that is ignored, or holds for its neighbours too."""
    before = counters(tree)
    off = [greedy(TOKENS, extra_args={"speculative_tree_size": 0}) for _ in LENGTHS]
    assert generate(tree, prompts(LENGTHS), off) == want
    assert since(before, counters(tree))["drafts"] == 0
    mixed = [greedy(TOKENS, extra_args={"speculative_tree_size": 2 * r}) for r in range(len(LENGTHS))]
    seen: list[list[int]] = []
    with watching(tree, lambda known, trees: seen.append([tree.size for tree in trees])):
        assert generate(tree, prompts(LENGTHS), mixed) == want
    assert [max(sizes[r] for sizes in seen if len(sizes) == len(LENGTHS)) for r in range(len(LENGTHS))] == [0, 2, 4, 6]


@pytest.mark.parametrize("wish", [-1, 2.5, "all", True, [3]])
def test_a_bad_wish_is_refused_when_the_request_comes(tree: LLM, wish: Any) -> None:
    """Catches a bad value found inside a step, where it would end the engine."""
    with pytest.raises(VLLMValidationError, match="speculative_tree_size"):
        generate(tree, [[5]], greedy(3, extra_args={"speculative_tree_size": wish}))


def test_no_word_about_a_useful_head(tree: LLM, want: list[list[int]], log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a warning that comes whatever is accepted."""
    monkeypatch.setattr(watch, "TREES", 10)
    runner_of(tree)._watch = watch.AcceptanceWatch(None)
    texts = [prompt + out for prompt, out in zip(prompts(LENGTHS), want, strict=True)]
    with drafting(tree, Oracle(None, runner_of(tree).drafter.growth, texts=texts, depth=4, width=2, sibling=1)):
        before = counters(tree)
        generate(tree, prompts(LENGTHS), greedy(TOKENS))
    assert since(before, counters(tree))["drafts"] > 20
    assert not any("hardly helps" in record.getMessage() for record in log.records)


def test_preempted_while_the_head_is_behind(folders: tuple[str, str], want: list[list[int]]) -> None:
    """Catches features of before a preemption written behind a new prefill's."""
    llm = engine(
        folders[0],
        **speculate(folders[1], tree_size=12, tree_depth=4, tree_top_k=3),
        num_gpu_blocks_override=8,
        max_model_len=128,
    )
    faulty = Faulty(runner_of(llm).drafter.drafter, lambda call: call % 4 != 0)
    with drafting(llm, faulty):
        assert generate(llm, prompts(LENGTHS), greedy(TOKENS)) == want
    assert any(metric.value > 0 for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    generate(llm, [[5]], greedy(1))
    assert len(runner_of(llm)._backlog) == 0


@pytest.mark.parametrize(("positions", "option"), [(64, None), (2048, 50)])
def test_beyond_the_longest_context_drafting_pauses(
    base: LLM, folders: tuple[str, str], tmp_path: Path, log: Any, positions: int, option: int | None
) -> None:
    """Catches a head read past its position table, and a text that stops with the drafts (scenario 36)."""
    folder = tiny_head(tmp_path / "head", copies=True, max_positions=positions)
    depth = 4
    llm = engine(
        folders[0], max_model_len=128, **speculate(folder, tree_size=12, tree_depth=depth, tree_top_k=3, max_context=option)
    )
    longest = option or positions - depth
    assert any("64 positions" in record.getMessage() for record in log.records) == (positions == 64)
    asked = prompts([10, 63, 64, 65, 100])
    drafted: list[int] = []

    def see(known: Known, trees: list[DraftTree]) -> None:
        drafted.extend(len(history) for history, tree in zip(known.histories, trees, strict=True) if tree.size)

    with watching(llm, see):
        got = [generate(llm, [prompt], greedy(120 - len(prompt)))[0] for prompt in asked]
        together = generate(llm, asked, greedy(20))
    assert got == [generate(base, [prompt], greedy(120 - len(prompt)))[0] for prompt in asked]
    assert together == [out[:20] for out in got]
    assert drafted and max(drafted) <= longest and max(drafted) > longest - depth - 1


def test_prefix_hits_do_not_change_drafts(folders: tuple[str, str]) -> None:
    """Catches the head's last pair of a cached block, made with another token after it (scenario 21); one block is given up."""
    llm = engine(folders[0], enable_prefix_caching=True, **speculate(folders[1], tree_size=12, tree_depth=4, tree_top_k=3))
    shared, (first, second) = prompts([96])[0], prompts([9, 11])
    asked = [shared + first, shared + second]
    cold = []
    for prompt in asked:
        cold.append(drafts_of(llm, prompt))
        assert llm.reset_prefix_cache()
    assert drafts_of(llm, asked[0]) == cold[0]
    hit = hits(llm)
    assert drafts_of(llm, asked[1]) == cold[1]
    assert hits(llm) - hit == 64  # of 96 cached
    options = speculate(folders[1], tree_size=12, tree_depth=4, tree_top_k=3)
    options["speculative_config"]["disable_eagle_block_drop"] = True
    same = engine(folders[0], enable_prefix_caching=True, **options)
    base_texts = [generate(same, [prompt], greedy(20))[0] for prompt in asked]
    assert hits(same) == 96
    assert base_texts == generate(llm, asked, greedy(20))


def drafts_of(llm: LLM, prompt: list[int]) -> list[list[int]]:
    """Return the text and every tree drafted for a prompt."""
    seen: list[list[int]] = []
    with watching(llm, lambda known, trees: seen.extend(tree.nodes for tree in trees)):
        return [*generate(llm, [prompt], greedy(20)), *seen]


def hits(llm: LLM) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")


def test_one_word_about_a_useless_head(target: str, head: str, log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches silence, or a flood, where a head of another target drafts in vain; and a word about one that is of use."""
    monkeypatch.setattr(watch, "TREES", 60)
    llm = engine(target, **speculate(head, tree_size=8))
    generate(llm, prompts(LENGTHS), greedy(50))
    told = [record.getMessage() for record in log.records if "hardly helps" in record.getMessage()]
    assert len(told) == 1 and head in told[0] and "another target" in told[0]

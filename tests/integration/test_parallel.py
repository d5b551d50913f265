"""Several processes: tensor parallel, whose ranks must do the same; data parallel, whose ranks must not wait; Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm.envs
from safetensors.torch import load_file
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from tests.heads.variants import edit_tensors
from tests.integration import parallel_ranks
from tests.integration.harness import ENGINE, core_of, counters, engine, generate, greedy, prompts, trained_like
from tests.integration.test_families import let_experts_in, write_family, write_head
from tests.integration.test_precision import eight_bits
from vllm_eagle import EagleError, speculate
from vllm_eagle.integration import pace
from vllm_eagle.integration.parallel import AgreedCosts
from vllm_eagle.integration.runner import TreeRunner
from vllm_eagle.testing import tiny_head, tiny_target
from vllm_eagle.train.words import Ends
from vllm_eagle.tree import DraftTree

ASKED = prompts([5, 33, 64, 17])
TOKENS = 40
PARAMS: dict[str, Any] = {
    "greedy": greedy(TOKENS),
    "sampled": [SamplingParams(temperature=0.8, seed=r, max_tokens=TOKENS, ignore_eos=True) for r in range(len(ASKED))],
}
TREE = {"tree_depth": 4, "tree_top_k": 4}


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """Bind no cores, which vLLM does by NUMA node, and end a step that hangs within a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vllm.envs.__dict__, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setitem(vllm.envs.__dict__, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 60)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setattr(LLM, "__repr__", object.__repr__)  # vLLM's asks the workers, and a failure's report would wait for ever
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a head that is often right, with an embedding that is the target's in its first half alone."""
    target, head = trained_like(tmp_path_factory.mktemp("models"))
    table = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"]
    table[128:] += 1e-3
    edit_tensors(Path(head), **{"embed_tokens.weight": table})
    return target, head


@contextmanager
def two_ranks(model: str, **options: Any) -> Iterator[LLM]:
    llm = engine(model, tensor_parallel_size=2, distributed_executor_backend="mp", **options)
    try:
        yield llm
    finally:
        core_of(llm).model_executor.shutdown()


def ask(llm: LLM, params: Any) -> list[list[int]]:
    return generate(llm, ASKED, params)


@pytest.fixture(scope="module")
def texts(models: tuple[str, str]) -> dict[str, list[list[int]]]:
    """What plain decoding writes in one process."""
    alone = engine(models[0])
    return {name: ask(alone, params) for name, params in PARAMS.items()}


@pytest.fixture(scope="module")
def trees(models: tuple[str, str], texts: dict[str, list[list[int]]]) -> Iterator[LLM]:
    with two_ranks(models[0], **speculate(models[1], tree_size="auto", **TREE)) as llm:
        llm.collective_rpc(parallel_ranks.watch)
        yield llm


@pytest.mark.parametrize("name", PARAMS)
def test_ranks_do_the_same(trees: LLM, texts: dict[str, list[list[int]]], name: str) -> None:
    """Catches ranks that verify different trees or decide by their own clocks (one rank's is wrong here), and lost text."""
    before = counters(trees)["accepted_tokens"]
    assert ask(trees, PARAMS[name]) == texts[name]
    assert counters(trees)["accepted_tokens"] > before
    (first, learnt), (second, same) = trees.collective_rpc(parallel_ranks.told)
    assert first == second
    assert learnt == same


def test_ranks_draw_the_same_without_seeds(trees: LLM) -> None:
    """Catches generators of requests without a seed that differ between ranks: the second would go on with another text."""
    trees.collective_rpc(parallel_ranks.told)
    ask(trees, SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True))
    (first, learnt), (second, same) = trees.collective_rpc(parallel_ranks.told)
    assert first == second
    assert learnt == same


def test_87_whose_embedding(trees: LLM) -> None:
    """Catches a rank that compares its own part of the embedding alone, and shares where another does not (scenario 87)."""
    assert trees.collective_rpc(parallel_ranks.embedding) == [("own", 128), ("own", 128)]


def test_shared_products(trees: LLM, models: tuple[str, str]) -> None:
    """Catches rows of the LM head lost between ranks, and logits that differ between them in any bit (draft vocabularies)."""
    weights = str(Path(models[0]) / "model.safetensors")
    (error, bits), (other, same) = trees.collective_rpc(parallel_ranks.products, args=(weights,))
    assert max(error, other) < 1e-4
    assert bits == same


def test_the_schedulers_tree_is_verified() -> None:
    """Catches a rank that verifies a tree of its own, or a chain, where the first rank's has gone to the scheduler."""
    mine = replace(DraftTree.build([5, 6, 7, 8], [-1, 0, 0, 1]), guesses=np.array([1.0, 0.6, 0.3, 0.2], np.float32))
    rank = SimpleNamespace(_trees={"a": mine}, _warned=False)

    def scheduled(drafts: list[int], kept: list[int] | None, parents: list[int]) -> tuple[list[int], list[int], bool]:
        tree = TreeRunner._scheduled_tree(rank, "a", drafts, kept, parents)  # type: ignore[arg-type]
        assert tree is not None
        return tree.nodes, tree.parents[1:].tolist(), tree.guesses is not None

    assert scheduled([6, 7], None, [0, 0]) == ([6, 7], [0, 0], True)  # cut by the scheduler
    assert scheduled([6, 8], [0, 1, 3], [0, 1]) == ([6, 8], [0, 1], True)  # pruned by a grammar
    assert not rank._warned
    assert scheduled([6, 7, 8], None, [0, 0, 2]) == ([6, 7, 8], [0, 0, 2], False)  # hangs elsewhere on this rank
    assert scheduled([6, 9], None, [0, 1]) == ([6, 9], [0, 1], False)
    assert scheduled([6, 9], [0, 1, 7], [0, 1]) == ([6, 9], [0, 1], False)  # a row this rank does not have
    assert scheduled([6, 7, 8, 9], None, [0, 0, 1, 3]) == ([6, 7, 8, 9], [0, 0, 1, 3], False)
    assert rank._warned


def test_costs_are_the_first_ranks() -> None:
    """Catches a rank that learns from its own clock, or learns something twice."""
    first, second = (AgreedCosts([1, 4, 16], [0.01, 0.02, 0.04], [0.001] * 3) for _ in range(2))
    for step in range(20):
        for costs, speed in ((first, 2.0), (second, 7.0 + step)):
            before = float(costs.verify(5)), float(costs.level(5)), costs.rest
            costs.verify.observe(5, 0.02 * speed)
            costs.first.observe(2, 0.001 * speed)
            costs.observe_rest(0.5 * speed)
            costs.observe_cycle(True, 4, 0.75 * speed)
            assert before == (float(costs.verify(5)), float(costs.level(5)), costs.rest)
            assert step or costs.slip(4) == 1
        seen, _ = first.leave(), second.leave()
        assert len(seen) == 4
        first.take(seen)
        second.take(seen)
    assert first.leave() == second.leave() == []
    for name in ("verify", "first", "level"):
        assert getattr(first, name).points() == getattr(second, name).points()
    assert first.rest == second.rest == 1.0
    assert first.slip(4) == second.slip(4) == 1.5
    assert 0.03 < float(second.verify(5)) < 0.06
    assert float(second.first(2)) == 2 * float(second.level(2))


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_ranks_start_with_the_same_costs(speed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that run different passes at start-up: one has its curve's file, or finds it true, and another does not."""
    kept = ([0.01, 0.04], [0.001, 0.002])
    told = [kept, speed < pace.SAME]  # what the first rank says, in turn
    passes: list[int] = []
    monkeypatch.setattr(pace, "agreed", lambda mine: told.pop(0))
    monkeypatch.setattr(pace, "_seconds", lambda rows, target: passes.extend(rows) or [0.01, 0.04 * 1.6])  # type: ignore[func-returns-value]
    found = pace._recall(tmp_path / "none.json", [1, 16], print)
    assert found == (kept if speed < pace.SAME else None)
    assert passes == [1, 16]
    assert told == []


async def answer(llm: AsyncLLM, name: str, rank: int, prompt: list[int], tokens: int) -> list[int]:
    async for out in llm.generate(TokensPrompt(prompt_token_ids=prompt), greedy(tokens), name, data_parallel_rank=rank):
        last = out
    return list(last.outputs[0].token_ids)


def test_89_a_rank_without_work(models: tuple[str, str]) -> None:
    """Catches a replica that waits for another which is idle, or drafts nothing near the length limit (scenario 89)."""
    long = prompts([440, 440])[1]
    plain = engine(models[0])
    limit = ENGINE["max_model_len"] - len(long)  # the last steps have no room for a tree
    wanted = [generate(plain, [long], greedy(limit))[0], generate(plain, ASKED[:2], greedy(TOKENS))]

    async def talk() -> tuple[list[int], list[list[int]]]:
        options = {**ENGINE, **speculate(models[1], tree_size=12, **TREE)}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=models[0], data_parallel_size=2, **options))
        try:
            alone = await asyncio.wait_for(answer(llm, "long", 0, long, limit), 60)
            asked = [answer(llm, f"later {r}", r, ASKED[r], TOKENS) for r in (0, 1)]
            return alone, await asyncio.wait_for(asyncio.gather(*asked), 60)
        finally:
            llm.shutdown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setitem(vllm.envs.__dict__, "VLLM_ENABLE_V1_MULTIPROCESSING", True)
        assert list(asyncio.run(talk())) == wanted


def test_90_ray(models: tuple[str, str]) -> None:
    """Catches an engine that starts Ray to die of it: vLLM's CPU platform names no resource Ray could count (scenario 90)."""
    assert not current_platform.ray_device_key  # so that plain vLLM says "current platform cpu does not support ray"
    with pytest.raises(EagleError, match="--distributed-executor-backend ray"):
        engine(models[0], distributed_executor_backend="ray", **speculate(models[1]))


def of_family(folder: Path, name: str) -> tuple[str, str, dict[str, Any]]:
    target = write_family(name, folder / "target")
    return target, write_head(folder / "head", Ends.load(Path(target)).embedding), {}


def case(folder: Path, name: str) -> tuple[str, str, dict[str, Any]]:
    """Write a target and a head, and return both with options."""
    if name == "eagle3":
        return tiny_target(folder / "target"), tiny_head(folder / "head", draft_vocab=101), {}
    if name == "eight bits":
        return eight_bits(tiny_target(folder / "plain")), tiny_head(folder / "head"), {}
    if name == "words":
        words = folder / "words.json"
        words.write_text(json.dumps(list(range(2, 251, 3))))  # 83: one rank has a row less
        return tiny_target(folder / "target"), tiny_head(folder / "head"), {"draft_vocab": str(words)}
    return of_family(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["words", "eagle3", "gemma2", "qwen3", "eight bits", "mixtral"])
def test_other_heads_and_targets(name: str, tmp_path: Path) -> None:
    """Catches a kind of head or target whose parts do not come together again: words of its own, caps, tied tables, experts."""
    target, head, options = case(tmp_path, name)
    with two_ranks(target) as llm:
        wanted = {name: ask(llm, params) for name, params in PARAMS.items()}
    if name != "eight bits":  # whose two halves of a row are rounded by scales of their own: plain vLLM writes another text
        let_experts_in()
        alone = engine(target)
        assert {name: ask(alone, params) for name, params in PARAMS.items()} == wanted
    whole = [ask + text for texts in wanted.values() for ask, text in zip(ASKED, texts, strict=True)]
    (tmp_path / "texts.json").write_text(json.dumps(whole))
    double = {"texts": str(tmp_path / "texts.json"), "depth": 3, "width": 2, "sibling": 1}
    drafter = {"drafter": "vllm_eagle.testing.Oracle", "drafter_options": double}
    with two_ranks(target, **speculate(head, tree_size=12, **TREE, **drafter, **options)) as llm:
        llm.collective_rpc(parallel_ranks.watch_head)
        assert {name: ask(llm, params) for name, params in PARAMS.items()} == wanted
        assert counters(llm)["accepted_tokens"] > len(PARAMS) * len(ASKED) * TOKENS / 2
        first, second = llm.collective_rpc(parallel_ranks.drafted)
    assert first == second
    assert len(first[0]) > 50
    assert first[1] is False


@pytest.mark.slow
def test_grammars_prune_on_every_rank(tmp_path: Path) -> None:
    """Catches a rank that verifies rows which a grammar has pruned from the first rank's tree."""
    target, head = tiny_target(tmp_path / "target", vocab=300, letters=True), tiny_head(tmp_path / "head", vocab=300)
    options = {"structured_outputs_config": StructuredOutputsConfig(backend="xgrammar")}
    kinds: list[dict[str, Any]] = [{"json": {"type": "array", "items": {"type": "integer"}}}, {"regex": "[a-z]{3,9}-[0-9]+"}]
    grammars = [StructuredOutputsParams(**kinds[r % 2]) for r in range(len(ASKED))]
    params = [
        SamplingParams(temperature=0.9 * (r // 2), seed=r, max_tokens=TOKENS, structured_outputs=grammar)
        for r, grammar in enumerate(grammars)
    ]
    wanted = generate(engine(target, **options), ASKED, params)
    (tmp_path / "texts.json").write_text(json.dumps([ask + text for ask, text in zip(ASKED, wanted, strict=True)]))
    double = {"texts": str(tmp_path / "texts.json"), "depth": 4, "width": 3, "sibling": 1, "vocab": 300}
    drafter = {"drafter": "vllm_eagle.testing.Oracle", "drafter_options": double}
    with two_ranks(target, **options, **speculate(head, tree_size=16, **TREE, **drafter)) as llm:
        llm.collective_rpc(parallel_ranks.watch_head)
        assert generate(llm, ASKED, params) == wanted
        counted = counters(llm)
        first, second = llm.collective_rpc(parallel_ranks.drafted)
    assert first == second
    assert first[1] is False
    assert counted["accepted_tokens"] > sum(map(len, wanted)) / 2
    assert counted["draft_tokens"] < 14 * counted["drafts"]  # of 15 nodes some are always outside

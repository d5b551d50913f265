"""K/V slots and blocks: every write lands in the request's own blocks, nothing is read or kept too long, all come back."""

from __future__ import annotations

import ctypes
import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.harness import (
    core_of,
    counters,
    drafting,
    engine,
    generate,
    greedy,
    preemptions,
    prompts,
    runner_of,
    since,
    token_budget,
    trace,
)
from vllm_eagle import EagleError, speculate
from vllm_eagle.integration.attention import TreeCPUAttentionImpl
from vllm_eagle.testing import Half, Oracle, tiny_head, tiny_target

BLOCK, TOKENS = 32, 14


@pytest.fixture(scope="module")
def base(target: str) -> LLM:
    return engine(target, max_num_seqs=16)


def half(llm: LLM, texts: list[list[int]], depth: int = 4, width: int = 3, **options: Any) -> Half:
    """A drafter that is right to a depth that changes from step to step, over the real head."""
    proposer = runner_of(llm).drafter
    shape: dict[str, Any] = {"texts": texts, "depth": depth, "width": width, "sibling": width - 1}
    return Half(proposer.drafter, proposer.growth, **shape, **{"right_depth": [depth, 1, 0, depth // 2], **options})


class Writes:
    """Who wrote where: after each step, the positions every layer wrote of every request in the batch."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.runner, self.scheduler = llm, runner_of(llm), core_of(llm).scheduler
        self.groups = {
            name: (index, group.kv_cache_spec.block_size)
            for index, group in enumerate(self.runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        self.positions: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.before: dict[str, tuple[int, int]] = {}  # tokens computed before this step, and its rows
        self.total = 0

    def note(self, layer: str, slots: Tensor) -> None:
        """Find the owner of every slot >= 0 by the scheduler's books, not by the runner's table."""
        group, size = self.groups[layer]
        batch = self.runner.input_batch
        starts = self.runner.query_start_loc.np
        owner: dict[int, tuple[str, int]] = {}
        for row, request in enumerate(batch.req_ids):
            self.before[request] = int(batch.num_computed_tokens_cpu[row]), int(starts[row + 1] - starts[row])
            for index, block in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request)[group]):
                assert block not in owner
                owner[block] = request, index
        assert 0 not in owner  # the null block is nobody's
        for slot in slots[slots >= 0].tolist():
            assert slot // size in owner, f"{layer} writes slot {slot}, of a block nobody in the batch owns"
            request, index = owner[slot // size]
            self.positions[layer][request].append(index * size + slot % size)

    def check(self) -> None:
        """Every layer wrote exactly the positions that became certain, each once."""
        batch = self.runner.input_batch
        for request, (before, rows) in self.before.items():
            tokens = int(batch.num_tokens_no_spec[batch.req_id_to_index[request]])  # the last was not through the model yet
            certain = list(range(before, min(before + rows, tokens - 1)))
            for layer in self.groups:
                assert sorted(self.positions[layer][request]) == certain, (layer, request)
            self.total += len(certain)
        self.positions.clear()
        self.before.clear()


@contextmanager
def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writes]:
    writes = Writes(llm)
    usual = TreeCPUAttentionImpl.do_kv_cache_update

    def spy(self: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        writes.note(layer.layer_name, slots)
        usual(self, layer, key, value, cache, slots)

    with monkeypatch.context() as patch:
        patch.setattr(TreeCPUAttentionImpl, "do_kv_cache_update", spy)
        yield writes


@pytest.mark.parametrize(("nodes", "depth", "width", "pages"), [(5, 2, 2, 1), (20, 3, 6, 2), (40, 8, 4, 1)])
def test_31_every_write_lands_in_the_requests_own_blocks(
    base: LLM, target: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, nodes: int, depth: int, width: int, pages: int
) -> None:
    """Catches a slot outside the request's blocks, in the null block, of a rejected node, or left unwritten (scenario 31)."""
    # with two sizes of pages the head's layers have blocks of their own
    head = tiny_head(tmp_path / "head", layers=2, heads=(8, 8, 64) if pages == 2 else (4, 2, 32))
    asked = prompts(range(1, 71))
    want = generate(base, asked, greedy(TOKENS + depth + 1))
    options = speculate(head, tree_size=nodes, tree_depth=4, tree_top_k=4)
    llm = engine(target, max_num_seqs=16, max_num_batched_tokens=400, **options)
    texts = [prompt + out for prompt, out in zip(asked, want, strict=True)]
    before = counters(llm)
    with watched(llm, monkeypatch) as writes, drafting(llm, half(llm, texts, depth, width)):
        found, _ = trace(llm, asked, greedy(TOKENS), lambda _: writes.check())
    assert found == [out[:TOKENS] for out in want]
    layers = len(runner_of(llm).compilation_config.static_forward_context)
    assert len(writes.groups) == layers == 4
    assert writes.total >= sum(len(prompt) + TOKENS - 1 for prompt in asked)
    assert since(before, counters(llm))["accepted_tokens"] > len(asked) * TOKENS / 4


def test_29_requests_the_budget_does_not_reach(base: LLM, target: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a placeholder that outlives its step, an id below 0 fed to a model, drafts lost in waiting (scenario 29)."""
    lengths = [40, 33, 64, 7, 20, 31, 50, 12, 3, 5, 1, 1, 1, 1, 1, 1]  # those of one token are padded to the size of a tree
    asked, tokens = prompts(lengths), [12 + 7 * r % 17 for r in range(16)]
    want = generate(base, asked, greedy(35))
    llm = engine(
        target, max_num_seqs=16, max_num_batched_tokens=50, **speculate(head, tree_size=15, tree_depth=4, tree_top_k=4)
    )
    runner, scheduler = runner_of(llm), core_of(llm).scheduler
    seen = {"lowest": 0, "padded": 0, "skipped": 0}

    def embedded(module: Any, inputs: tuple[Tensor, ...]) -> None:  # by the target for itself, and for the head
        seen["lowest"] = min(seen["lowest"], int(inputs[0].min()))

    prepare = runner._prepare_inputs

    def prepared(output: Any, counts: Any) -> Any:
        made = prepare(output, counts)
        ids = runner.input_ids.cpu[: output.total_num_scheduled_tokens]
        padded = [drafts for drafts in output.scheduled_spec_decode_tokens.values() if drafts[0] == -1]
        assert int((ids < 0).sum()) == sum(map(len, padded))  # of this step, by vLLM's own padding
        seen["padded"] += len(padded)
        seen["skipped"] += len(scheduler.running) - len(output.num_scheduled_tokens)
        return made

    monkeypatch.setattr(runner, "_prepare_inputs", prepared)
    hook = runner.model.model.embed_tokens.register_forward_pre_hook(embedded)
    before = counters(llm)
    texts = [prompt + out for prompt, out in zip(asked, want, strict=True)]
    for budget in (50, 36):
        with drafting(llm, half(llm, texts, right_depth=4)), token_budget(llm, budget):
            found = generate(llm, asked, [greedy(most) for most in tokens])
        assert found == [out[:most] for out, most in zip(want, tokens, strict=True)]
    hook.remove()
    assert seen["lowest"] == 0
    assert not runner._warned  # every tree was verified as it was proposed, however long it waited
    assert seen["padded"] > 3 and seen["skipped"] > 20
    counted = since(before, counters(llm))
    assert counted["accepted_tokens"] > 2 * counted["drafts"]  # whole trees where the budget reaches them


SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 22,
    "max_model_len": 224,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": True,
}
"""A pool in which three requests of 200 tokens fit."""


@pytest.fixture(scope="module")
def small(base: LLM, target: str, head: str) -> LLM:
    return engine(target, **SMALL, **speculate(head, tree_size=12, tree_depth=4, tree_top_k=4))


def free_blocks(llm: LLM) -> int:
    return int(core_of(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


LONG = prompts([20, 5, 31, 40, 12, 33, 25, 9])
SEEDED = [SamplingParams(temperature=0 if r % 3 else 0.8, seed=r, max_tokens=150, ignore_eos=True) for r in range(len(LONG))]


@pytest.fixture(scope="module")
def long(base: LLM) -> list[list[int]]:
    return generate(base, LONG, SEEDED)


@pytest.mark.parametrize("reset", [False, True])
def test_30_preempted_between_drafting_and_verifying(small: LLM, long: list[list[int]], reset: bool) -> None:
    """Catches a tree, a count or K/V of before a preemption used after it (scenario 30)."""
    texts = [prompt + out for prompt, out in zip(LONG, long, strict=True)]
    before = preemptions(small)

    def empty_the_cache(step: int) -> None:
        if step in (3, 4, 9, 30, 31, 60):
            running = len(core_of(small).scheduler.running)
            assert not small.reset_prefix_cache()  # blocks are in use
            assert small.reset_prefix_cache(reset_running_requests=True)
            assert running and not core_of(small).scheduler.running

    shape: dict[str, Any] = {"depth": 3, "width": 3, "right_depth": [3, 1, 0, 2]}
    with drafting(small, half(small, texts, **shape)):
        assert trace(small, LONG, SEEDED, empty_the_cache if reset else None)[0] == long
    assert preemptions(small) - before > (12 if reset else 3)
    assert free_blocks(small) == SMALL["num_gpu_blocks_override"] - 1


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_32_every_block_comes_back(small: LLM, count: int) -> None:
    """Catches a block, a tree or a request left behind by a stop, a limit, an abort or a preemption (scenario 32)."""
    start, before = free_blocks(small), preemptions(small)
    generator = torch.Generator().manual_seed(count)
    core, reasons = small.llm_engine, defaultdict(int)
    for r in range(count):
        prompt = torch.randint(2, 256, (1 + r * 7 % 90,), generator=generator).tolist()
        options: dict[str, Any] = [
            {"ignore_eos": True},
            {"stop_token_ids": list(range(2, 60))},
            {"ignore_eos": True},  # to be aborted
            {"structured_outputs": StructuredOutputsParams(regex="((w5|w9|w30)(w7|w11){3,9}w3)+")},
        ][r % 4]
        params = SamplingParams(temperature=0.7 * (r % 3), seed=r, max_tokens=70, **options)
        core.add_request(f"{count}-{r}", {"prompt_token_ids": prompt}, params)
    step = 0
    aborted = iter([f"{count}-{r}" for r in range(2, count, 4)])
    while core.has_unfinished_requests():
        for out in core.step():
            if out.finished:
                reasons[out.outputs[0].finish_reason] += 1
        step += 1
        if step % 3 == 0 and (name := next(aborted, None)) is not None:
            core.abort_request([name])
    core.step()  # the runner hears of the last ones
    assert reasons["stop"] > count // 8 and reasons["length"] > count // 8
    assert preemptions(small) > before and sum(reasons.values()) + count // 10 < count
    runner, scheduler = runner_of(small), core_of(small).scheduler
    assert free_blocks(small) == start == SMALL["num_gpu_blocks_override"] - 1
    assert small.reset_prefix_cache()
    left = [runner.requests, runner._trees, runner.input_batch.req_ids, runner.input_batch.generators]
    left += [scheduler.requests, scheduler.running, scheduler.waiting, scheduler._pruned]
    assert not any(map(len, left)) and runner._step is None


@pytest.mark.parametrize("pages", [1, 2])
def test_94_a_block_pays_for_the_head(target: str, tmp_path: Any, pages: int) -> None:
    """Catches K/V of the head on top of what the user gave the cache: blocks are counted with all layers (scenario 94)."""
    head = tiny_head(tmp_path / "head", layers=2, heads=(8, 8, 64) if pages == 2 else (4, 2, 32))
    llm = engine(target, num_gpu_blocks_override=None, **speculate(head, tree_size=8))
    runner = runner_of(llm)
    caches = {name: layer.kv_cache for name, layer in runner.compilation_config.static_forward_context.items()}
    assert len(caches) == 4
    blocks = core_of(llm).scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    needed = {name: 2 * BLOCK * (8 * 64 if pages == 2 and name.startswith("eagle") else 2 * 32) * 4 for name in caches}
    given = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
    assert blocks * sum(needed.values()) <= given < 1.001 * blocks * sum(needed.values())
    for name, cache in caches.items():
        assert cache.nbytes == blocks * needed[name]
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches.values()}
    assert sum(storages.values()) <= given


def peak(step: Callable[[], object]) -> int:
    """Return by how many bytes the process grew at most while `step` ran."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else the step is served from what earlier ones left
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def test_94_a_full_batch_of_large_trees(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches copies of the logits of every node in the walk: it needs those of one level at a time (scenario 94)."""
    vocab, nodes, batch = 16384, 40, 8
    target, head = tiny_target(tmp_path / "target", vocab=vocab, layers=1), tiny_head(tmp_path / "head", vocab=vocab)
    options = speculate(head, tree_size=nodes, tree_depth=5, tree_top_k=8)
    llm = engine(target, max_num_seqs=batch, max_num_batched_tokens=512, max_logprobs=5, **options)
    asked = prompts([9] * batch, vocab)
    params = [SamplingParams(temperature=1, seed=r, top_p=0.9, max_tokens=9, ignore_eos=True, logprobs=5) for r in range(batch)]
    generate(llm, asked, params)
    runner, grown = runner_of(llm), []
    sample = runner._sample

    def measured(logits: Tensor, metadata: Any) -> Any:
        made = []
        growth = peak(lambda: made.append(sample(logits, metadata)))
        if len(logits) == batch * (nodes + 1):
            grown.append(growth / logits.nbytes)
        return made[0]

    monkeypatch.setattr(runner, "_sample", measured)
    generate(llm, asked, params)
    assert grown and max(grown) < 0.5


def test_73_embedding_and_lm_head_are_the_targets_own(base: LLM, tmp_path: Any) -> None:
    """Catches a second copy of tied weights in memory, or of one that a head's folder brings along (scenario 73)."""
    vocab = 1088  # a size no other tensor of this process has; vLLM pads to multiples of 64
    target, folder = tiny_target(tmp_path / "target", vocab=vocab, tied=True), tiny_head(tmp_path / "head", vocab=vocab)
    weights = load_file(Path(folder) / "model.safetensors")
    copy = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"]
    save_file(weights | {"embed_tokens.weight": copy}, Path(folder) / "model.safetensors")
    del weights, copy
    llm = engine(target, **speculate(folder, tree_size=8))
    model, drafter = runner_of(llm).model, runner_of(llm).drafter.drafter
    shared = model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() == shared.data_ptr()
    assert drafter.embed is model.model.embed_tokens
    gc.unfreeze()  # vLLM hides from the collector whatever there is when an engine has started
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]
    wide = [x for x in tensors if x.device.type == "cpu" and vocab in x.shape and 64 in x.shape]
    assert {x.untyped_storage().data_ptr() for x in wide} == {shared.untyped_storage().data_ptr()}
    asked = prompts([5, 40, 17], vocab)
    plain = engine(target)
    assert generate(llm, asked, greedy(20)) == generate(plain, asked, greedy(20))


@pytest.mark.slow
def test_39_position_32768(tmp_path: Any) -> None:
    """Catches an index too narrow for a long text, and one long text that spoils drafting for all (scenario 39)."""
    shape: dict[str, Any] = {"hidden": 32, "heads": (1, 1, 32)}
    target, head = (
        tiny_target(tmp_path / "target", layers=1, max_positions=40000, **shape),
        tiny_head(tmp_path / "head", **shape),
    )
    options: dict[str, Any] = {"max_model_len": 40000, "max_num_batched_tokens": 4096, "max_num_seqs": 2}
    options["num_gpu_blocks_override"] = 1300
    asked = prompts([32740, 20])
    want = generate(engine(target, **options), asked, greedy(80))
    llm = engine(target, **options, **speculate(head, tree_size=12, tree_depth=4, tree_top_k=3))
    proposer = runner_of(llm).drafter
    texts = [prompt + out for prompt, out in zip(asked, want, strict=True)]
    oracle = Oracle(proposer.drafter, proposer.growth, texts=texts, depth=3, width=3, sibling=1)

    def drafted(text: list[int]) -> list[list[int]]:
        nodes = []
        trace(llm, [text], greedy(12), lambda _: nodes.extend(tree.nodes for tree in runner_of(llm)._trees.values()))
        return nodes

    before = drafted(asked[1])
    for prompt, out in zip(asked, want, strict=True):  # 28 tokens before the border and 33 behind it, then a fresh one
        with drafting(llm, oracle):
            ids, (counts,) = trace(llm, [prompt], greedy(61))
        assert ids == [out[:61]]
        assert counts == [1] + [4] * 15
    assert drafted(asked[1]) == before and len(before) > 8


SIZES = [(seqs, budget, nodes) for seqs in (1, 2, 16) for budget in (32, 64, 512) for nodes in (1, 8, 40)]
QUICK = {(1, 32, 1), (2, 32, 40), (16, 64, 40)}


@pytest.mark.parametrize(
    ("seqs", "budget", "nodes"),
    [pytest.param(*sizes, marks=() if sizes in QUICK else pytest.mark.slow) for sizes in SIZES],
)
def test_75_batch_and_budget(base: LLM, target: str, head: str, seqs: int, budget: int, nodes: int) -> None:
    """Catches a buffer too small, a budget that no tree fits, and one sequence alone that cannot run (scenario 75)."""
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": budget}
    options |= speculate(head, tree_size=nodes, tree_depth=min(nodes, 4), tree_top_k=4)
    if nodes + 1 > budget:
        message = f"{nodes} nodes and its root, {nodes + 1} tokens, do not fit --max-num-batched-tokens {budget}"
        with pytest.raises(EagleError, match=f"{message}; lower --speculative-tree-size or raise that"):
            engine(target, **options)
        return
    asked = prompts([1 + 11 * r for r in range(seqs + 1)])
    want = generate(base, asked, greedy(16))
    llm = engine(target, **options)
    texts = [prompt + out for prompt, out in zip(asked, want, strict=True)]
    width = 3 if nodes > 8 else 1
    before = counters(llm)
    with drafting(llm, half(llm, texts, min(nodes, 4), width, right_depth=min(nodes, 4))):
        assert generate(llm, asked, greedy(10)) == [out[:10] for out in want]
    assert since(before, counters(llm))["accepted_tokens"] > seqs

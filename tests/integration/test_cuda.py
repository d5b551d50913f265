"""What the CUDA worker does on the device, done on CPU tensors: in an engine with all of its steps, and piece by piece.

Nothing here runs on a GPU. The kernels are `tests/attention/test_kernels.py`'s; FlashAttention is stood in for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.layers.attention import Attention
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import flash_attn

from tests.attention.kernel_checks import random_tree
from tests.integration.harness import counters, engine, generate, greedy, prompts, runner_of, since
from vllm_eagle import EagleError, envs, speculate
from vllm_eagle.attention.device import StaticRows
from vllm_eagle.attention.layout import PAIR_LAYOUT
from vllm_eagle.attention.reference import ReferenceTreeAttention
from vllm_eagle.integration import checks, ledger
from vllm_eagle.integration.attention import Trees
from vllm_eagle.integration.cuda_attention import DeviceTrees, TreeFlashAttentionImpl
from vllm_eagle.integration.cuda_runner import CUDATreeRunner, DeviceSteps
from vllm_eagle.integration.cuda_worker import CUDATreeWorker
from vllm_eagle.integration.runner import TreeRunner
from vllm_eagle.names import CUDA_ATTENTION_BACKENDS, CUDA_WORKER, WORKER
from vllm_eagle.testing import Half
from vllm_eagle.tree import DraftTree, TreeRows

LENGTHS = [5, 31, 32, 33, 64, 7, 50]
TOKENS = 31


# In an engine ---------------------------------------------------------------------------------------------------------


class Kept(dict[str, tuple[Tensor, Tensor]]):
    """Stand in for `KeptRows`: the CPU's layout of pages is not the one its kernel writes."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner, self.commits = runner, 0

    def commit(self, source: Tensor, slots: Tensor) -> None:
        self.commits += 1
        layers = self.runner.compilation_config.static_forward_context
        for group, groups in enumerate(self.runner.attn_groups):
            wanted = (source >= 0) & (slots[group] >= 0)
            for name in (name for g in groups for name in g.layer_names if name in self):
                layer, (key, value) = layers[name], self[name]
                layer.impl.do_kv_cache_update(
                    layer, key[source[wanted]], value[source[wanted]], layer.kv_cache, slots[group][wanted]
                )


class DeviceStepsOnCPU(DeviceSteps, TreeRunner):
    """The CUDA runner's steps over vLLM's CPU runner."""

    def _attach(self, rows: TreeRows, index: Tensor, plain: Any, plain_index: Tensor) -> Trees:
        return Trees(self.tree_attention, rows, index, plain, plain_index, self._kept)


@pytest.fixture(scope="module")
def base(target: str) -> LLM:
    return engine(target)


@pytest.fixture(scope="module")
def tree(base: LLM, target: str, head: str) -> LLM:
    llm = engine(target, **speculate(head, tree_size=63, tree_depth=5, tree_top_k=8))
    runner = runner_of(llm)
    runner.__class__ = DeviceStepsOnCPU
    runner._rows = StaticRows(runner.max_num_reqs, runner.num_spec_tokens + 1, torch.device("cpu"))
    runner._kept, runner._shares_noise = Kept(runner), False
    return llm


@pytest.fixture(scope="module")
def texts(base: LLM) -> list[list[int]]:
    asked = prompts(LENGTHS)
    return [prompt + out for prompt, out in zip(asked, generate(base, asked, greedy(TOKENS + 16)), strict=True)]


@pytest.fixture
def oracle(tree: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Half:
    """Be right down to depths that differ between the requests of a step."""
    proposer = runner_of(tree).drafter
    double = Half(None, proposer.growth, texts=texts, depth=4, width=3, sibling=1, right_depth=[0, 4, 2, 1])
    monkeypatch.setattr(proposer, "drafter", double)
    return double


def test_greedy_on_the_device(base: LLM, tree: LLM, oracle: Half) -> None:
    """Catches accepted K/V in a wrong slot, a walk by rows of another request, a step's trees over the last step's numbers."""
    before, commits = counters(tree), runner_of(tree)._kept.commits
    asked = prompts(LENGTHS)
    assert generate(tree, asked, greedy(TOKENS)) == generate(base, asked, greedy(TOKENS))
    accepted = since(before, counters(tree))["accepted_tokens_per_pos"]
    assert accepted[0] > accepted[1] > accepted[3] > 0 == accepted[4]
    assert runner_of(tree)._kept.commits > commits


def test_seeded_on_the_device(base: LLM, tree: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches draws of levels behind the end of a walk that stay drawn, beside others greedy or still in prefill."""
    asked = prompts(LENGTHS)
    params = [
        SamplingParams(
            temperature=0.0 if r == 2 else 0.8, top_p=0.9, seed=7 + r, max_tokens=TOKENS, ignore_eos=True, logprobs=2
        )
        for r in range(len(asked))
    ]
    written, wanted = answers(base, asked, params)
    proposer = runner_of(tree).drafter
    known = [prompt + out for prompt, out in zip(asked, written, strict=True)]
    some_right = Half(None, proposer.growth, texts=known, depth=3, width=2, sibling=1, right_depth=[0, 3, 1, 2])
    monkeypatch.setattr(proposer, "drafter", some_right)
    before = counters(tree)
    got, given = answers(tree, asked, params)
    assert got == written
    for mine, plain in zip(given, wanted, strict=True):
        assert [list(place) for place in mine] == [list(place) for place in plain]
        flat, flat_plain = ([x.logprob for place in places for x in place.values()] for places in (mine, plain))
        assert flat == pytest.approx(flat_plain, abs=1e-4)
    seen = since(before, counters(tree))
    accepted = seen["accepted_tokens_per_pos"]
    assert seen["drafts"] > accepted[0] > accepted[1] > accepted[2] > 0  # walks of every length, all drawing in every level
    assert runner_of(tree)._draws is not None


def answers(llm: LLM, asked: list[list[int]], params: list[SamplingParams]) -> tuple[list[list[int]], list[Any]]:
    """Return ids and logprobs of each answer."""
    outs = llm.generate([TokensPrompt(prompt_token_ids=text) for text in asked], params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs], [out.outputs[0].logprobs for out in outs]


def test_draws_with_history_go_level_by_level(base: LLM, tree: LLM, oracle: Half) -> None:
    """Catches penalties and minimum lengths on the path without a host, where nobody keeps the history."""
    asked = prompts(LENGTHS)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=TOKENS, repetition_penalty=1.3, min_tokens=9)
    assert generate(tree, asked, params) == generate(base, asked, params)
    assert runner_of(tree)._walk is None


# Piece by piece -------------------------------------------------------------------------------------------------------


def test_loads_without_a_gpu() -> None:
    """Catches CUDA code that needs a GPU to be imported, a name that leads nowhere, and another vLLM."""
    assert resolve_obj_by_qualname(CUDA_WORKER) is CUDATreeWorker
    assert CUDATreeRunner._sample is DeviceSteps._sample
    for path in CUDA_ATTENTION_BACKENDS.values():
        backend = resolve_obj_by_qualname(path)
        assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    ledger.check(ledger.CUDA_TOUCHES)


def test_a_gpu_is_refused_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a start on hardware nobody has run this on, unless the user says so; and the CPU's worker chosen there."""
    monkeypatch.setattr(checks, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True))
    spec = SimpleNamespace(method="custom_class", model=checks.PROPOSER)
    config = SimpleNamespace(
        speculative_config=spec, additional_config={}, parallel_config=SimpleNamespace(worker_cls=WORKER),
        scheduler_config=SimpleNamespace(scheduler_cls="other"),
    )  # fmt: skip
    checks.choose_worker(config)
    assert config.parallel_config.worker_cls == CUDA_WORKER
    with pytest.raises(EagleError, match="never been run on a GPU"):
        checks.check_config(config)
    monkeypatch.setenv("VLLM_EAGLE_CUDA", "1")
    assert envs.tries_cuda()
    with pytest.raises(EagleError, match="need our scheduler"):  # the platform and the worker have passed
        checks.check_config(config)


def test_static_rows() -> None:
    """Catches numbers of the step before in a place without a tree, and tensors that move."""
    generator = torch.Generator().manual_seed(0)
    trees = [random_tree(n, generator) for n in (3, 0, 63)]
    static, table = StaticRows(9, 64, torch.device("cpu")), torch.arange(45).reshape(9, 5).int()
    static.fill([trees[2]] * 9, range(0, 576, 64), [77] * 9)
    first = static.over(table)
    static.fill([trees[0], None, trees[1], trees[2]], [2, 7, 9, 20], [30, 4, 0, 50])
    rows, places = static.over(table), [0, 2, 3]
    plain = TreeRows.of_trees(trees, torch.tensor([2, 9, 20]).int(), torch.tensor([30, 0, 50]).int(), table[places])
    for name in ("query_start", "num_rows", "first_word", "key_start", "context_len", "block_table"):
        assert torch.equal(getattr(rows, name)[places], getattr(plain, name)), name
    assert torch.equal(rows.words[: len(plain.words)], plain.words)
    assert rows.num_rows.tolist() == [4, 0, 1, 64] and rows.context_len[1] == 0
    assert (rows.most_rows, rows.longest) == (64, 50) and static.first_rows.tolist() == [0, 4, 4, 5, 69]
    assert rows.words.data_ptr() == first.words.data_ptr() and rows.num_rows.data_ptr() == first.num_rows.data_ptr()


def test_layers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches K/V kept for the head's layers, committed there without ever having been written, and a backend without trees."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    layers = {name: attention_layer(name) for name in ("target.0", "target.1", "head.0")}
    groups = [[SimpleNamespace(layer_names=["target.0", "head.0"])], [SimpleNamespace(layer_names=["target.1"])]]
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers), attn_groups=groups, device=torch.device("cpu"),
        max_num_reqs=3, num_spec_tokens=4, max_num_tokens=12, drafter=SimpleNamespace(layers=[layers["head.0"]]),
    )  # fmt: skip
    CUDATreeRunner._choose_attention(runner)
    kept = runner._kept._sets
    assert [(one.names, one.kept.shape, one._group.tolist()) for one in kept] == [
        (["target.0", "target.1"], (2, 2, 12, 2, 64), [0, 1])  # no more rows than a step has tokens
    ]
    layers["target.1"].__dict__["impl"] = object()
    with pytest.raises(EagleError, match=r"layer target\.1 attends through object, .* use --attention-backend FLASH_ATTN"):
        CUDATreeRunner._choose_attention(runner)


def attention_layer(name: str) -> Any:
    """Make one of vLLM's layers without its constructor, which asks for an engine's configuration."""
    layer = Attention.__new__(Attention)
    layer.__dict__ |= {"layer_name": name, "impl": flash_impl(4, 2, 64, None), "kv_cache": torch.zeros(3, 2, 16, 128)}
    return layer


class TorchTreeAttention:
    """Stand in for `TritonTreeAttention` with its two ways in."""

    def __init__(self) -> None:
        self.whole, self.finished = 0, 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        rows: TreeRows,
        scale: float,
        output: Tensor,
        **more: Any,
    ) -> None:
        self.whole += 1
        ReferenceTreeAttention(PAIR_LAYOUT)(query, key, value, cache, rows, scale, output, **more)

    def finish(
        self, query: Tensor, key: Tensor, value: Tensor, context: Tensor, lse: Tensor, rows: TreeRows, scale: float,
        output: Tensor, *, soft_cap: float, sinks: Tensor | None,
    ) -> None:  # fmt: skip
        self.finished += 1
        group = query.shape[1] // key.shape[1]
        for r in range(len(rows.num_rows)):
            start, count, first = int(rows.query_start[r]), int(rows.num_rows[r]), int(rows.first_word[r])
            seen = (rows.words[first : first + count, None] >> torch.arange(count)) & 1 == 1
            here = slice(start, start + count)
            own_key, own_value = (x[here].repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
            scores = query[here].transpose(0, 1) @ own_key.transpose(1, 2) * scale
            scores = scores.masked_fill(~seen, float("-inf"))
            log_sum = lse[:, first : first + count]
            both = torch.logaddexp(log_sum, scores.logsumexp(-1))
            own = (scores.softmax(-1) @ own_value) * (scores.logsumexp(-1) - both).exp()[..., None]
            past = context[first : first + count].transpose(0, 1) * (log_sum - both).exp()[..., None]
            output[here] = (own + past.nan_to_num()).transpose(0, 1)


def flash_in_torch(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor, block_table: Tensor, softmax_scale: float,
    causal: bool, return_softmax_lse: bool = False, out: Tensor | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Do what vLLM's FlashAttention does with paged K/V [blocks, block, G, K]: output [T, H, K] and log-sums [H, T]."""
    output, lse = torch.zeros_like(q) if out is None else out, torch.full((q.shape[1], len(q)), float("-inf"))
    group = q.shape[1] // k.shape[2]
    for r, length in enumerate(seqused_k.tolist()):
        here, blocks = slice(int(cu_seqlens_q[r]), int(cu_seqlens_q[r + 1])), block_table[r].long()
        count = here.stop - here.start
        if not count or not length:
            continue
        keys, values = (x[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q[here].transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        if causal:
            scores += torch.full((count, length), float("-inf")).triu(length - count + 1)
        output[here], lse[:, here] = (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1)
    return (output, lse) if return_softmax_lse else output


@pytest.mark.parametrize(("window", "whole"), [(None, 0), (40, 1)])
def test_flash_attention_and_trees(monkeypatch: pytest.MonkeyPatch, window: int | None, whole: int) -> None:
    """Catches context attended twice, other requests' rows taken for a tree's, a window left to FlashAttention's counting."""
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_in_torch, raising=False)
    generator, heads, kv_heads, size, block = torch.Generator().manual_seed(2), 4, 2, 64, 16
    trees: list[DraftTree | None] = [random_tree(9, generator), None, random_tree(20, generator)]
    starts, contexts, total, plain_rows = [0, 10, 17], [33, 20, 0], 38, slice(10, 17)
    cache = torch.randn(12, kv_heads, block, 2 * size, generator=generator)
    table = torch.arange(12).reshape(3, 4).int()
    query, key, value = (torch.randn(total, h, size, generator=generator) for h in (heads, kv_heads, kv_heads))
    static, attention, kept = StaticRows(4, 64, torch.device("cpu")), TorchTreeAttention(), []
    static.fill(trees, starts, contexts)
    index = torch.tensor([*range(10), *range(17, 38)])
    common = {
        "num_actual_tokens": 7,
        "query_start_loc": torch.tensor([0, 7]),
        "seq_lens": torch.tensor([27]),
        "max_query_len": 7,
    }
    plain = flash_attn.FlashAttentionMetadata(
        **common,
        max_seq_len=27,
        block_table=table[1:2],
        slot_mapping=torch.arange(7),  # 20 tokens before and its own 7
    )
    layer_kept = SimpleNamespace(keep=lambda name, *rows: kept.append((name, rows[-1])))
    ride = DeviceTrees(attention, static.over(table), index, plain, torch.arange(10, 17), static.first_rows, layer_kept)
    scale = torch.tensor(1.0)
    layer = SimpleNamespace(layer_name="one", _k_scale=scale, _v_scale=scale, _q_scale=scale)
    impl, output = flash_impl(heads, kv_heads, size, window), torch.full_like(query, 7.0)
    impl.forward(layer, query, key, value, cache, SimpleNamespace(trees=ride), output)
    want = torch.full_like(query, 7.0)
    real = TreeRows.of_trees(
        [tree for tree in trees if tree], torch.tensor([0, 17]).int(), torch.tensor([33, 0]).int(), table[[0, 2]]
    )
    ReferenceTreeAttention(PAIR_LAYOUT)(query, key, value, cache, real, impl.scale, want, window=window or 0)
    flash_in_torch(
        query[plain_rows], cache[..., :size].transpose(1, 2), cache[..., size:].transpose(1, 2), causal=True,
        cu_seqlens_q=torch.tensor([0, 7]), seqused_k=torch.tensor([27]), block_table=table[1:2], softmax_scale=impl.scale,
        out=want[plain_rows],
    )  # fmt: skip
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
    assert (attention.whole, attention.finished) == (whole, 1 - whole)
    assert [(name, rows.tolist()) for name, rows in kept] == [("one", index.tolist())]


def flash_impl(heads: int, kv_heads: int, size: int, window: int | None) -> Any:
    """Make the implementation without vLLM's own constructor, which asks a GPU for its version of FlashAttention."""
    impl = TreeFlashAttentionImpl.__new__(TreeFlashAttentionImpl)
    settings = {
        "num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "scale": size**-0.5, "alibi_slopes": None,
        "sliding_window": (-1, -1) if window is None else (window - 1, 0), "kv_cache_dtype": "auto", "logits_soft_cap": 0.0,
        "attn_type": AttentionType.DECODER, "vllm_flash_attn_version": 3, "supports_quant_query_input": False, "sinks": None,
        "fa4_hd256": False, "dcp_world_size": 1,
    }  # fmt: skip
    for name, setting in settings.items():
        setattr(impl, name, setting)
    return impl

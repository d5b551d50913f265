"""Drive an in-process engine and look inside it."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import ReasoningConfig, StructuredOutputsConfig
from vllm.sampling_params import RequestOutputKind

from tests.integration.random_requests import Damp, Shift
from vllm_eagle import speculate
from vllm_eagle.attention import VEC_LAYOUT
from vllm_eagle.drafting import Drafter, HeadCache, Known
from vllm_eagle.testing import tiny_head, tiny_target
from vllm_eagle.tree import DraftTree

atexit.register(gc.unfreeze)  # as a worker's shutdown does: else all it made counts as leaked at exit

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 9,
    "block_size": 32,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 200,
}


def engine(model: str, **options: Any) -> LLM:
    """Start an engine on a tiny model; it may be dropped while others go on."""
    llm = LLM(model, **{**ENGINE, **options})
    llm.llm_engine.engine_core._finalizer.detach()  # when collected, it would destroy the process groups all engines share
    return llm


def trained_like(folder: Path) -> tuple[str, str]:
    """Write a target and a head that is right about it most of the time, and whose guesses hang on all it attends to."""
    target, head = tiny_target(folder / "target", damping=0.0005), tiny_head(folder / "head", copies=True, layers=2)
    weights = load_file(folder / "head" / "model.safetensors")
    copy = torch.cat((torch.eye(64), torch.zeros(64, 64)), 1)
    weights["fc.weight"] = copy + 0.5 * (weights["fc.weight"] - copy)
    for name in weights:
        if "v_proj" in name or "o_proj" in name:
            weights[name] = 3 * weights[name]
    save_file(weights, folder / "head" / "model.safetensors", metadata={"format": "pt"})
    return target, head


THINK, END_OF_THINKING = 2, 3
LETTERS = list(range(36, 131))
"""Printable tokens of the tiny target with letters."""


def lettered_options() -> dict[str, Any]:
    """Return options for a tiny target that writes letters, with everything a request may ask for."""
    return {
        "logits_processors": [Shift, Damp],
        "max_logprobs": 10,
        "reasoning_config": ReasoningConfig(
            reasoning_parser="deepseek_r1", reasoning_start_str="<think>", reasoning_end_str="</think>"
        ),
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar", reasoning_parser="deepseek_r1"),
    }


def lettered_engines(folder: Path, **options: Any) -> tuple[LLM, LLM]:
    """Start plain decoding and trees on such a target."""
    target, head = tiny_target(folder / "target", vocab=300, letters=True), tiny_head(folder / "head", vocab=300)
    options = {**lettered_options(), **options}
    return engine(target, **options), engine(target, **options, **speculate(head, tree_size=34, tree_depth=5, tree_top_k=4))


@contextmanager
def drafting(llm: LLM, drafter: Drafter) -> Iterator[None]:
    """Let a double draft for a while."""
    proposer = runner_of(llm).drafter
    usual, proposer.drafter = proposer.drafter, drafter
    try:
        yield
    finally:
        proposer.drafter = usual


@contextmanager
def watching(llm: LLM, see: Callable[[Known, list[DraftTree]], None]) -> Iterator[None]:
    """Show every step's trees, and what the drafter was told, for a while."""
    usual: Drafter = runner_of(llm).drafter.drafter

    class Shown:
        def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
            trees = usual.draft(known, cache)
            see(known, trees)
            return trees

    with drafting(llm, Shown()):
        yield


@dataclass(frozen=True)
class Verified:
    """What one request did in one step, as it passed between scheduler and runner."""

    request: str
    nodes: list[int]  # scheduled for verification; -1: padding
    emitted: list[int]  # tokens, before the end of the request was looked for


@contextmanager
def traced(llm: LLM) -> Iterator[list[Verified]]:
    """Record every step of every request, before anything is counted."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found: list[Verified] = []
    usual = scheduler.update_from_output

    def update(scheduled: Any, output: Any) -> Any:
        drafts = scheduled.scheduled_spec_decode_tokens
        found.extend(
            Verified(request, list(drafts.get(request, [])), list(emitted))
            for request, emitted in zip(output.req_ids, output.sampled_token_ids, strict=True)
        )
        return usual(scheduled, output)

    scheduler.update_from_output = update
    try:
        yield found
    finally:
        del scheduler.update_from_output


def runner_of(llm: LLM) -> Any:
    """Return the model runner of an in-process engine."""
    return core_of(llm).model_executor.driver_worker.worker.model_runner


def core_of(llm: LLM) -> Any:
    """Return the engine core of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core


@contextmanager
def token_budget(llm: LLM, tokens: int) -> Iterator[None]:
    """Let the scheduler hand out fewer tokens per step for a while."""
    scheduler = core_of(llm).scheduler
    usual, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = usual


def preemptions(llm: LLM) -> int:
    """Return how many requests vLLM has preempted."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def prompts(lengths: Sequence[int], vocab: int = 256) -> list[list[int]]:
    """Return prompts of given lengths, all different and without special tokens."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in lengths]


def generate(llm: LLM, texts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Return the output ids of each prompt."""
    outs = llm.generate([TokensPrompt(prompt_token_ids=list(text)) for text in texts], params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


def greedy(tokens: int, **options: Any) -> SamplingParams:
    """Return greedy parameters that do not stop at EOS."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)


def trace(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    after_step: Callable[[int], object] | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the output ids of each prompt and how many tokens each step added to them; `after_step` hears of every step."""
    every = [params] * len(texts) if isinstance(params, SamplingParams) else params
    for r, (text, one) in enumerate(zip(texts, every, strict=True)):
        one = one.clone()
        one.output_kind = RequestOutputKind.DELTA
        llm.llm_engine.add_request(str(r), {"prompt_token_ids": list(text)}, one)
    ids: list[list[int]] = [[] for _ in texts]
    counts: list[list[int]] = [[] for _ in texts]
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            added = list(out.outputs[0].token_ids)
            ids[int(out.request_id)] += added
            counts[int(out.request_id)].append(len(added))
        step += 1
        if after_step is not None:
            after_step(step)
    return ids, counts


def counters(llm: LLM) -> dict[str, Any]:
    """Return vLLM's speculation counters: drafts, draft_tokens, accepted_tokens, accepted_tokens_per_pos."""
    prefix = "vllm:spec_decode_num_"
    found = {m.name.removeprefix(prefix): m for m in llm.get_metrics() if m.name.startswith(prefix)}
    return {name: getattr(m, "value", None) if hasattr(m, "value") else m.values for name, m in found.items()}


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what was counted between two readings."""
    return {
        name: [a - b for a, b in zip(value, before[name], strict=True)] if isinstance(value, list) else value - before[name]
        for name, value in after.items()
    }


def cached(llm: LLM, request: str, tokens: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each layer's cached keys and values [tokens, G, K] of a running request."""
    runner = runner_of(llm)
    row = runner.input_batch.req_id_to_index[request]
    found = {}
    for group, groups in enumerate(runner.attn_groups):
        blocks = torch.from_numpy(runner.input_batch.block_table[group].get_numpy_array()[row]).clone()
        for name in (name for g in groups for name in g.layer_names):
            cache = runner.compilation_config.static_forward_context[name].kv_cache
            found[name] = VEC_LAYOUT.gather(cache, blocks[: -(-tokens // cache.shape[2])], tokens)
    return found

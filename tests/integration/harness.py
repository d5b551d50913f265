"""Drive an in-process engine and look inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import ReasoningConfig, StructuredOutputsConfig

from tests.integration.random_requests import Damp, Shift
from vllm_eagle import speculate
from vllm_eagle.attention import VEC_LAYOUT
from vllm_eagle.drafting import Drafter, HeadCache, Known
from vllm_eagle.testing import tiny_head, tiny_target
from vllm_eagle.tree import DraftTree

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
    """Start an engine on a tiny model."""
    return LLM(model, **{**ENGINE, **options})


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


def runner_of(llm: LLM) -> Any:
    """Return the model runner of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


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

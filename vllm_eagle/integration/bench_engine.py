"""vLLM as a contestant of the benchmark: plain, with trees, or with one of its own ways to speculate."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_eagle.bench.child import Answer, Job, Outcome, Settings, pace, serve
from vllm_eagle.bench.contestants import Contestant, parse
from vllm_eagle.config import AUTO
from vllm_eagle.speculate import speculate

NGRAM = 5
SIZES = "vllm:spec_decode_tree_drafted_nodes"


def start(settings: Settings) -> Answer:
    """Start the engine in this process."""
    contestant = parse(settings.contestant)
    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        enforce_eager=not settings.compiled,
        max_model_len=settings.max_len,
        max_num_seqs=settings.concurrency,
        # whole prompts: vLLM cannot rewind the generator of a seeded request after part of one; and room for every tree
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(2048, settings.max_len, 64 * settings.concurrency),
        kv_cache_memory_bytes=settings.cache_bytes,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options(contestant, settings.head),
    )
    return Client(llm).answer


def options(contestant: Contestant, head: str | None) -> dict[str, Any]:
    """Return what makes `LLM(...)` speculate in this contestant's way."""
    match contestant.kind:
        case "auto":
            return speculate(head, tree_size=AUTO)
        case "tree":
            return speculate(head, tree_size=contestant.size, tree_depth=contestant.depth)
        case "chain":
            return _own(method="eagle", model=head, num_speculative_tokens=contestant.size)
        case "ngram":
            size = contestant.size or NGRAM
            return _own(method="ngram", num_speculative_tokens=size, prompt_lookup_min=2, prompt_lookup_max=5)
        case "suffix":
            return _own(method="suffix")
    return {}


def _own(**config: Any) -> dict[str, Any]:
    return {"speculative_config": config}


@dataclass
class _Flight:
    number: int
    asked: float
    moments: list[float] = field(default_factory=list)


class Client:
    """Keep so many requests in flight and note when their tokens come."""

    def __init__(self, llm: LLM) -> None:
        """`llm` counts: its log statistics are on."""
        self._llm, self._asked = llm, 0

    def answer(self, job: Job) -> Outcome:
        """Answer all prompts; a new one takes the place of a finished one."""
        engine, before = self._llm.llm_engine, self._counted()
        waiting, flying = deque(enumerate(job.prompts)), {}
        ids: list[list[int]] = [[] for _ in job.prompts]
        ended: list[_Flight] = []
        began = time.perf_counter()
        while waiting or flying:
            while waiting and len(flying) < job.concurrency:
                number, prompt = waiting.popleft()
                flying[self._submit(prompt, number, job)] = _Flight(number, time.perf_counter())
            outputs, now = engine.step(), time.perf_counter()
            for output in outputs:
                flight = flying[output.request_id]
                if output.outputs[0].token_ids:
                    ids[flight.number] += output.outputs[0].token_ids
                    flight.moments.append(now)
                if output.finished:
                    ended.append(flying.pop(output.request_id))
        seconds = time.perf_counter() - began
        paces = [pace(f.asked, f.moments, len(ids[f.number])) for f in ended]
        first, rest = [first for first, _ in paces], [one for _, rest in paces for one in rest]
        return Outcome(seconds, ids, first, rest, **since(before, self._counted()))

    def _submit(self, prompt: list[int], number: int, job: Job) -> str:
        params = SamplingParams(
            temperature=job.temperature,
            seed=number if job.temperature else None,
            max_tokens=job.tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._asked += 1
        self._llm.llm_engine.add_request(str(self._asked), {"prompt_token_ids": list(prompt)}, params)
        return str(self._asked)

    def _counted(self) -> dict[str, Any]:
        found = {metric.name: metric for metric in self._llm.get_metrics()}
        names = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
        counts = {name: getattr(found.get(f"vllm:spec_decode_{theirs}"), "value", 0) for name, theirs in names.items()}
        return counts | {"sizes": dict(found[SIZES].buckets) if SIZES in found else {}}


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what was counted in between; a histogram's buckets hold all below their limit, ours only what is in them."""
    sizes, below = {}, 0
    for upper, count in after["sizes"].items():
        up_to_here = count - before["sizes"][upper]
        if up_to_here > below:
            sizes[upper.removesuffix(".0")] = up_to_here - below
        below = up_to_here
    return {name: after[name] - before[name] for name in ("drafts", "drafted", "accepted")} | {"sizes": sizes}


if __name__ == "__main__":
    serve(start)

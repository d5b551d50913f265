"""Say where the milliseconds of a step go: plain decoding and trees, part by part, for several numbers of requests.

    python benchmarks/profile_step.py --model MODEL --head HEAD --prompts mt_bench.jsonl --requests 1 8 32

Every part is timed by itself, without the parts inside it; a step is one that reads no prompt. Numbers are means over the
steps of the middle half of all steps by duration, so that a neighbour's burst does not count. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
TREES = "vllm_eagle.integration.runner:TreeRunner."
OUTER = {  # what -> its name; `draft: ` is put before whatever runs inside drafting
    "vllm.v1.engine.llm_engine:LLMEngine.step": "engine: the rest",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "engine: schedule",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "engine: update requests",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": "engine: texts and outputs",
    RUNNER + "execute_model": "target: the rest",
    RUNNER + "_update_states": "target: batch state",
    RUNNER + "_prepare_inputs": "target: inputs",
    TREES + "_prepare_inputs": "target: inputs, trees",
    RUNNER + "_build_attention_metadata": "target: attention metadata",
    TREES + "_build_attention_metadata": "target: attention metadata, trees",
    RUNNER + "_model_forward": "target: forward, the rest",
    "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward": "LM head",
    RUNNER + "sample_tokens": "sample: the rest",
    RUNNER + "_sample": "sample: draw",
    TREES + "_sample": "sample: walk",
    RUNNER + "_bookkeeping_sync": "sample: bookkeeping",
    TREES + "_commit": "sample: commit",
    TREES + "propose_draft_token_ids": "draft: the rest",
    TREES + "take_draft_token_ids": "draft: hand out",
    "vllm_eagle.integration.runner:peek_draws": "noise",
    "vllm_eagle.drafting.head_drafter:HeadDrafter.draft": "grow",
    "vllm_eagle.drafting.candidates:DraftVocabulary.__call__": "LM head and top k",
    "vllm_eagle.tree.pool:CandidatePool.add": "pool",
    "vllm_eagle.tree.pool:CandidatePool.expand": "pool",
    "vllm_eagle.tree.pool:CandidatePool.trees": "trees",
    "vllm_eagle.integration.head_cache:PagedHeadCache.level_rows": "level layout",
    "vllm_eagle.control.controller:Controller.worthwhile": "controller",
    "vllm_eagle.control.controller:Controller.calibrate": "controller",
    "vllm_eagle.control.controller:Controller.deeper": "controller",
    "vllm_eagle.control.controller:Controller.choose": "controller",
    "vllm_eagle.control.controller:Controller.verified": "controller",
}
INNER = {  # inside the forward pass, where compilation leaves nothing to see
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": "target: matrix products",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": "attention, causal",
    "vllm_eagle.attention.native:NativeTreeAttention.__call__": "attention, trees",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": "K/V written",
    "vllm_eagle.integration.gemm:PackedLinear.forward": "matrix products",
}


class Stopwatch:
    """Add up the time of each part, without the parts inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack: list[list[Any]] = []  # name, seconds of the parts inside

    def watch(self, place: str, name: str) -> None:
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *classes, function = path.split(".")
        for part in classes:
            owner = getattr(owner, part)
        inner = owner.__dict__[function] if function in vars(owner) else None
        if inner is None:
            raise SystemExit(f"{place} is not there in this version; mend the table in {__file__}")

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            drafting = any(entry[0].startswith("draft") for entry in self._stack)
            entry = [f"draft: {name}" if drafting and ":" not in name else name, 0.0]
            self._stack.append(entry)
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self._stack.pop()
                self.spent[entry[0]] += took - entry[1]
                if self._stack:
                    self._stack[-1][1] += took

        setattr(owner, function, timed)


def main() -> int:
    args = parse()
    from vllm_eagle import speculate

    watch = Stopwatch()
    for place, name in (OUTER | ({} if args.compiled else INNER)).items():
        watch.watch(place, name)
    result: dict[str, Any] = {}
    for kind in ("plain", "trees"):
        options = speculate(str(args.head), tree_size=args.size) if kind == "trees" else {}
        llm = start(args, **options)
        for count in args.requests:
            result[f"{kind} {count}"] = measure(llm, watch, args, count)
        del llm
    show(result)
    print(json.dumps(result))
    return 0


def start(args: argparse.Namespace, **extra: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(args.model),
        dtype="float32",
        enforce_eager=not args.compiled,
        max_model_len=1024,
        max_num_seqs=max(args.requests),
        disable_log_stats=True,
        enable_prefix_caching=False,
        **extra,
    )


def measure(llm: Any, watch: Stopwatch, args: argparse.Namespace, count: int) -> dict[str, float]:
    """Serve `count` requests at once; return milliseconds by part, of the step, and tokens a step."""
    from acceptance import read  # the script beside this one
    from vllm import SamplingParams

    prompts = read(args, llm)
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.tokens, ignore_eos=True)
    for i in range(count):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompts[i % len(prompts)]}, params)
    steps: list[tuple[float, int, dict[str, float]]] = []
    written: dict[str, int] = {}
    running = count
    while running == count:  # the last steps have fewer requests
        watch.spent.clear()
        began = time.perf_counter()
        outputs = llm.llm_engine.step()
        took = time.perf_counter() - began
        fresh = sum(len(one.outputs[0].token_ids) - written.get(one.request_id, 0) for one in outputs)
        if len(written) == count:
            steps.append((took, fresh, dict(watch.spent)))
        written |= {one.request_id: len(one.outputs[0].token_ids) for one in outputs}
        running -= sum(one.finished for one in outputs)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    steps.sort(key=lambda step: step[0])
    middle = steps[len(steps) // 4 : max(len(steps) * 3 // 4, len(steps) // 4 + 1)]
    names = sorted({name for _, _, spent in middle for name in spent})
    parts = {name: 1e3 * sum(spent.get(name, 0.0) for _, _, spent in middle) / len(middle) for name in names}
    whole = 1e3 * sum(took for took, _, _ in middle) / len(middle)
    tokens = sum(fresh for _, fresh, _ in steps) / len(steps)
    rounded = {name: round(value, 2) for name, value in parts.items()}
    return {"step": round(whole, 2), "tokens per step": round(tokens, 2), "steps": len(steps), **rounded}


def show(result: dict[str, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for found in result.values() for name in found))
    order = ["step", "tokens per step", "steps", *sorted(set(names) - {"step", "tokens per step", "steps"})]
    print(f"{'milliseconds of a step':36}" + "".join(f"{case:>12}" for case in result))
    for name in order:
        print(f"{name:36}" + "".join(f"{found.get(name, 0):12.2f}" for found in result.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl with turns, such as MT-bench's questions")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="at once (default: 1 8 32)")
    parser.add_argument("--size", type=lambda word: word if word == "auto" else int(word), default="auto", help="of trees")
    parser.add_argument("--count", type=int, default=32, help="prompts read (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, help="per answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--compiled", action="store_true", help="with torch.compile; what is inside the pass is not told apart")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

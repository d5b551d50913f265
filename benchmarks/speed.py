"""Measure tokens per second with trees against plain vLLM: same process, interleaved, median of several rounds.

    python benchmarks/speed.py --model MODEL --head HEAD --prompts mt_bench.jsonl --batches 1 4 --sizes auto 8 12

Prints a row per case (the ratio is to plain vLLM of the same rounds) and ends in one JSON line with the machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> int:
    args = parse()
    from vllm_eagle import speculate

    contestants = {"plain": start(args, {})}
    for size in args.sizes:
        depth = None if size == "auto" else args.depth
        options = {"tree_size": size, "tree_depth": depth, "draft_vocab": args.draft_vocab}
        contestants[f"tree {size}"] = start(args, speculate(str(args.head), **options))
    if args.chain:
        spec = {"method": "eagle", "model": str(args.head), "num_speculative_tokens": args.chain}
        contestants[f"vLLM chain {args.chain}"] = start(args, {"speculative_config": spec})
    prompts = read(args, contestants["plain"])
    for llm in contestants.values():
        run(llm, prompts[:1], 1, 8)
    rows = []
    for batch in args.batches:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        tokens = {}
        for _ in range(args.rounds):
            for name, llm in contestants.items():
                taken, tokens[name] = run(llm, prompts, batch, args.tokens)
                seconds[name].append(taken)
        for name in contestants:
            ratio = statistics.median(p / t for p, t in zip(seconds["plain"], seconds[name], strict=True))
            rate = tokens[name] / statistics.median(seconds[name])
            rows.append({"batch": batch, "contestant": name, "tokens_per_s": round(rate, 1), "ratio": round(ratio, 2)})
            print(f"batch {batch:3}  {name:16} {rate:8.1f} tokens/s   x{ratio:.2f}", flush=True)
    print(json.dumps({"rows": rows, **provenance(args)}))
    return 0


def start(args: argparse.Namespace, extra: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        str(args.model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
        **extra,
    )


def read(args: argparse.Namespace, llm: Any) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    chosen = rows[:: max(1, len(rows) // args.count)][: args.count]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["turns"][0]}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in chosen
    ]


def run(llm: Any, prompts: list[list[int]], batch: int, tokens: int) -> tuple[float, int]:
    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = batch
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - began, sum(len(out.outputs[0].token_ids) for out in outs)


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "commit": commit,
        "preload": os.environ.get("LD_PRELOAD", ""),
        "head": args.head.name,
        "rounds": args.rounds,
        "prompts": args.count,
        "tokens": args.tokens,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl with a list `turns` in each row")
    parser.add_argument("--sizes", type=lambda size: size if size == "auto" else int(size), nargs="+", default=["auto", 8, 12])
    parser.add_argument("--depth", type=int, default=4, help="levels of trees of a fixed size")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chain", type=int, default=0, help="also measure vLLM's own chain EAGLE of this length")
    parser.add_argument("--draft-vocab", default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

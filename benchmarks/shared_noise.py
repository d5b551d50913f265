"""Compare accepted drafts with and without shared noise at temperature > 0, and check that no id depends on it.

python benchmarks/shared_noise.py --model MODEL --head HEAD --prompts mt_bench.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    args = parse()
    from vllm import LLM, SamplingParams

    from vllm_eagle import speculate

    llm = LLM(
        str(args.model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=args.batch,
        disable_log_stats=False,
        enable_prefix_caching=False,
        **speculate(str(args.head), tree_size=args.size),
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert runner._shares_noise, "this sampler's noise is not known"
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.count]
    chats = [[{"role": "user", "content": row["turns"][0]}] for row in rows]
    for temperature in args.temperatures:
        written: list[Any] = []
        line: dict[str, Any] = {"temperature": temperature, "nodes": args.size, "requests": len(rows)}
        for shares in (False, True):
            runner._shares_noise = shares
            params = [SamplingParams(temperature=temperature, seed=i, max_tokens=args.tokens) for i in range(len(rows))]
            before = counters(llm)
            outs = llm.chat(chats, params, use_tqdm=False)
            steps, accepted = (after - was for after, was in zip(counters(llm), before, strict=True))
            line["shared" if shares else "without"] = round(1 + accepted / steps, 3)
            written.append([list(out.outputs[0].token_ids) for out in outs])
        line["tokens"] = sum(map(len, written[0]))
        line["texts_identical"] = sum(a == b for a, b in zip(*written, strict=True))
        print(json.dumps(line), flush=True)


def counters(llm: Any) -> tuple[int, int]:
    found = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num")}
    return found["vllm:spec_decode_num_drafts"].value, found["vllm:spec_decode_num_accepted_tokens"].value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl with a list `turns` in each row")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=12)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    return parser.parse_args()


if __name__ == "__main__":
    main()

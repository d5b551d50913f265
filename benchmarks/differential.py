"""Compare ids with trees and without on a real model: every tree size, batch size and sampling mode.

    python benchmarks/differential.py --model MODEL --head HEAD --prompts mt_bench.jsonl --out results/

One case is one JSON line in OUT/cases.jsonl; a case that is there already is skipped, so a killed run goes on. Plain vLLM
at batch 1 is the reference; plain vLLM at the other batch sizes is counted beside it, since rounding differs there too.
A difference is excused only as a tie: both candidates' final scores on the common prefix closer than 1e-4.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

TIE = 1e-4
MODES = ("greedy", "seeded")


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    cases = args.out / "cases.jsonl"
    done = {tuple(json.loads(line)["case"]) for line in cases.read_text().splitlines()} if cases.exists() else set()
    work = Work(args)
    for batch in args.batches:
        for size in args.sizes:
            for mode in args.modes:
                case = (mode, size, batch)
                if case in done:
                    continue
                result = work.compare(*case)
                with cases.open("a") as out:
                    out.write(json.dumps({"case": case, **result}) + "\n")
                print(case, result, flush=True)
    rows = [json.loads(line) for line in cases.read_text().splitlines()]
    failed = [row["case"] for row in rows if row["case"][1] and row["unexcused"]]
    tokens, ties = (sum(row[name] for row in rows if row["case"][1]) for name in ("tokens", "ties"))
    print(json.dumps({"cases": len(rows), "tokens": tokens, "ties": ties, "failed": failed}))
    return 1 if failed or ties * 5000 > tokens else 0


class Work:
    """Hold the engines: plain vLLM, and one for each tree size."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args = args
        self.trees: dict[int, Any] = {}
        rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.count]
        tokenizer = AutoTokenizer.from_pretrained(str(args.model))
        self.prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["turns"][0]}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for row in rows
        ]

    @functools.cached_property
    def plain(self) -> Any:
        return self._engine({})

    def _engine(self, extra: dict[str, Any]) -> Any:
        from vllm import LLM

        return LLM(
            str(self.args.model),
            dtype="float32",
            enforce_eager=not self.args.compile,
            max_model_len=2048,
            max_num_seqs=16,
            disable_log_stats=False,
            enable_prefix_caching=False,
            **extra,
        )

    def _params(self, mode: str) -> list[Any]:
        from vllm import SamplingParams

        common = {"max_tokens": self.args.tokens}
        if mode == "greedy":
            return [SamplingParams(temperature=0, **common) for _ in self.prompts]
        return [SamplingParams(temperature=0.8, seed=1000 + i, **common) for i in range(len(self.prompts))]

    def reference(self, mode: str) -> list[list[int]]:
        file = self.args.out / f"plain_{mode}.json"
        if not file.exists():
            file.write_text(json.dumps(self.run(self.plain, mode, 1)[0]))
        return json.loads(file.read_text())

    def run(self, llm: Any, mode: str, batch: int) -> tuple[list[list[int]], float]:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = batch
        began = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": p} for p in self.prompts], self._params(mode), use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs], time.perf_counter() - began

    def compare(self, mode: str, size: int, batch: int) -> dict[str, Any]:
        from vllm_eagle import speculate

        want = self.reference(mode)
        if size and size not in self.trees:
            # engines stay alive: dropping one tears down the process groups all of them share
            self.trees[size] = self._engine(speculate(str(self.args.head), tree_size=size, draft_vocab=self.args.draft_vocab))
        llm = self.trees[size] if size else self.plain
        before = drafts(llm)
        got, seconds = self.run(llm, mode, batch)
        tokens = sum(map(len, got))
        margins = [self.margin(mode, i, a, b) for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b]
        result: dict[str, Any] = {"tokens": tokens, "seconds": round(seconds, 1), "differ": len(margins), "margins": margins}
        result["ties"] = sum(margin < TIE for margin in margins)
        result["unexcused"] = len(margins) - result["ties"]
        if size:
            steps, accepted = (after - was for after, was in zip(drafts(llm), before, strict=True))
            result["mean_accepted_length"] = round(1 + accepted / max(1, steps), 3)
        return result

    def margin(self, mode: str, index: int, want: list[int], got: list[int]) -> float:
        """Return how far apart plain decoding scores the two candidates, on the prefix both share."""
        import torch
        from vllm import SamplingParams

        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
        if at is None:
            return float("inf")  # one is longer: no tie can explain that
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=50)
        prompt = {"prompt_token_ids": self.prompts[index] + want[:at]}
        scores = self.plain.generate([prompt], params, use_tqdm=False)[0].outputs[0].logprobs[0]
        if want[at] not in scores or got[at] not in scores:
            return float("inf")
        gap = scores[want[at]].logprob - scores[got[at]].logprob
        if mode == "greedy":
            return abs(gap)
        generator = torch.Generator().manual_seed(self._params(mode)[index].seed)
        noise = [torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long) for _ in range(at + 1)][-1]
        return abs(gap / 0.8 + noise_gap(noise, want[at], got[at]))


def noise_gap(noise: Any, first: int, second: int) -> float:
    """Return the engine's own noise of one token minus another's, by bisection on its sampling op."""
    import torch

    low, high = -60.0, 60.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        logits = torch.full((1, max(first, second) + 1), float("-inf"))
        logits[0, first], logits[0, second] = middle, 0.0
        if int(torch.ops._C.fused_gumbel_argmax(logits, noise)) == first:
            high = middle
        else:
            low = middle
    return -high


def drafts(llm: Any) -> tuple[int, int]:
    found = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num")}
    return tuple(found[f"vllm:spec_decode_num_{name}"].value if found else 0 for name in ("drafts", "accepted_tokens"))  # type: ignore[return-value]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl with a list `turns` in each row")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1, 8, 25, 60], help="0 is plain vLLM")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 4, 1])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--draft-vocab", default=None)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

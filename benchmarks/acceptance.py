"""Measure what one head gets accepted: vLLM's own chain EAGLE, the same chain as a tree, and a dynamic tree.

    python benchmarks/acceptance.py --model MODEL --head HEAD --prompts mt_bench.jsonl

One request at a time, greedy, fp32. The two chains must accept the same, step by step. While the dynamic tree serves, every
node the head expands is compared with the paper's loop (no cache, the whole prefix each time); `worst_logit_gap` is by depth.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> int:
    args = parse()
    from vllm_eagle import speculate

    head, depth = str(args.head), args.chain
    chain = {"speculative_config": {"method": "eagle", "model": head, "num_speculative_tokens": depth}}
    own = start(args, **chain)
    prompts = read(args, own)
    vllm_steps = [steps(own, prompt, args.tokens) for prompt in prompts]
    print(f"vLLM's chain of {depth}: {mean(vllm_steps):.3f}", flush=True)
    mine = start(args, **speculate(head, tree_size=depth, tree_depth=depth, tree_top_k=1, draft_vocab="all"))
    chain_steps = [steps(mine, prompt, args.tokens) for prompt in prompts]
    same = sum(a == b for a, b in zip(vllm_steps, chain_steps, strict=True))
    print(
        f"the chain as a tree: {mean(chain_steps):.3f}, step by step the same for {same} of {len(prompts)} prompts", flush=True
    )
    tree = start(args, **speculate(head, tree_size=args.size, tree_depth=5, tree_top_k=8, draft_vocab="all"))
    checked = check_drafts(tree, args.head)
    tree_steps = [steps(tree, prompt, args.tokens) for prompt in prompts]
    result = {
        "prompts": len(prompts),
        "tokens": args.tokens,
        "vllm_chain": round(mean(vllm_steps), 3),
        "tree_chain": round(mean(chain_steps), 3),
        "chains_equal": same,
        "tree_nodes": args.size,
        "tree": round(mean(tree_steps), 3),
        "checked_nodes": dict(sorted(checked.checked.items())),
        "worst_logit_gap": {depth: float(f"{gap:.2g}") for depth, gap in sorted(checked.worst.items())},
    }
    print(json.dumps(result))
    return 0 if same == len(prompts) and max(checked.worst.values()) < 1e-4 else 1


def start(args: argparse.Namespace, **extra: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(args.model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        disable_log_stats=True,
        **extra,
    )


def read(args: argparse.Namespace, llm: Any) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.count]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["turns"][0]}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]


def steps(llm: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return how many tokens each step after the prompt's emitted; the last step, cut by the length, is left out."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=tokens, output_kind=RequestOutputKind.DELTA)
    llm.llm_engine.add_request("0", {"prompt_token_ids": prompt}, params)
    emitted = []
    while llm.llm_engine.has_unfinished_requests():
        emitted += [len(out.outputs[0].token_ids) for out in llm.llm_engine.step()]
    return emitted[1:-1]


def mean(all_steps: list[list[int]]) -> float:
    flat = [count for one in all_steps for count in one]
    return sum(flat) / len(flat)


def check_drafts(llm: Any, head: Path) -> Any:
    from vllm_eagle.heads import load_head
    from vllm_eagle.testing import CheckedDrafter

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model = runner.model
    runner.drafter.drafter = CheckedDrafter(
        runner.drafter.drafter, load_head(head), model.embed_input_ids, model.compute_logits
    )
    return runner.drafter.drafter


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl with a list `turns` in each row")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--chain", type=int, default=4)
    parser.add_argument("--size", type=int, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

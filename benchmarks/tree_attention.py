"""Measure tree attention against vLLM's own causal op on the same rows: same batch, context, threads; interleaved, medians.

    python benchmarks/tree_attention.py --requests 1 8 32 --contexts 64 1024 8192 --nodes 16

The causal op finds the keys of its last rows in the cache, tree attention beside it. A row per case, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from vllm_eagle.attention.native import NativeTreeAttention
from vllm_eagle.tree import DraftTree, TreeRows

BLOCK = 128


def causal(query: Tensor, cache: Tensor, table: Tensor, context: int, rows: int, output: Tensor) -> Callable[[], None]:
    requests, heads, size = len(table), query.shape[1], query.shape[2]
    starts = torch.arange(requests + 1, dtype=torch.int32) * rows
    lengths = torch.full((requests,), context + rows, dtype=torch.int32)
    keys, values = cache.view(cache.shape[0], cache.shape[1], 2 * BLOCK, size).chunk(2, dim=2)
    plan = ops.cpu_attn_get_scheduler_metadata(
        requests, heads, cache.shape[1], size, lengths, query.dtype, starts, True, -1, "vec", True
    )
    return lambda: ops.cpu_attention_with_kv_cache(
        query, keys, values, output, starts, lengths, size**-0.5, True, None, -1, table, 0.0, plan, None
    )


def tree(
    query: Tensor, key: Tensor, cache: Tensor, table: Tensor, context: int, rows: int, output: Tensor
) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(rows)
    shape = DraftTree.build(
        list(range(rows)), [-1] + [int(torch.randint(0, row, (1,), generator=generator)) for row in range(1, rows)]
    )
    starts = torch.arange(len(table), dtype=torch.int32) * rows
    laid = TreeRows.of_trees([shape] * len(table), starts, torch.full((len(table),), context, dtype=torch.int32), table)
    attention = NativeTreeAttention()
    return lambda: attention(query, key, key, cache, laid, query.shape[2] ** -0.5, output)


def seconds(run: Callable[[], None], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


def measure(args: argparse.Namespace, requests: int, context: int) -> dict[str, float]:
    rows = args.nodes + 1
    blocks = -(-(context + rows) // BLOCK)
    cache = torch.randn(requests * blocks, args.kv_heads, BLOCK, 2 * args.size, dtype=args.dtype)
    table = torch.randperm(requests * blocks).reshape(requests, blocks).int()
    query, output = (torch.randn(requests * rows, args.heads, args.size, dtype=args.dtype) for _ in range(2))
    key = torch.randn(requests * rows, args.kv_heads, args.size, dtype=args.dtype)
    theirs = causal(query, cache, table, context, rows, output)
    ours = tree(query, key, cache, table, context, rows, output)
    calls = max(1, int(0.02 / min(seconds(theirs, 1), seconds(theirs, 1))))
    times = [(seconds(theirs, calls), seconds(ours, calls)) for _ in range(args.rounds)]
    ratio = statistics.median(b / a for a, b in times)
    return {
        "requests": requests,
        "context": context,
        "causal_us": round(1e6 * statistics.median(a for a, _ in times), 1),
        "tree_us": round(1e6 * statistics.median(b for _, b in times), 1),
        "ratio": round(ratio, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 1024, 4096, 8192])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--heads", type=int, default=9, help="query heads (default: SmolLM2-135M's)")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    found = []
    for context in args.contexts:
        for requests in args.requests:
            found.append(measure(args, requests, context))
            line = (
                "{requests:3} requests, context {context:5}: causal {causal_us:9.1f} us, tree {tree_us:9.1f} us, x{ratio:.2f}"
            )
            print(line.format(**found[-1]), flush=True)
    print(json.dumps({"nodes": args.nodes, "threads": torch.get_num_threads(), "dtype": str(args.dtype), "cases": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

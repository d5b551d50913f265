"""Check the Triton kernels on a GPU: first that they are right, then how fast, against FlashAttention and the memory's speed.

    python benchmarks/gpu/check.py                       under 4 minutes; prints tables, then one JSON line
    python benchmarks/gpu/check.py --sweep               other tiles, too, for three of the cases (some minutes more)
    TRITON_INTERPRET=1 python benchmarks/gpu/check.py    no GPU: small shapes, right or wrong alone

Needs a copy of this repository with torch, triton and numpy; vLLM is not imported. One layer is measured. `floor` is the time
that reading the context once and the rest once takes at the speed of a large copy on the same device; `causal` is torch's
FlashAttention over the same rows with the same context, contiguous and not paged. Contexts lie in several sets, larger together
than the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vllm_eagle.attention import kernels  # noqa: E402
from vllm_eagle.attention.layout import PAIR_LAYOUT  # noqa: E402
from vllm_eagle.attention.reference import ReferenceTreeAttention  # noqa: E402
from vllm_eagle.tree import DraftTree, TreeRows  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP8 = torch.float8_e4m3fn
CLOSE = {torch.float16: 3e-3, torch.bfloat16: 1.5e-2, torch.float32: 1e-5}
"""Most relative error, norm of the difference over norm of the float32 reference."""
SET = 512 << 20
"""Bytes of context that a round reads at least, so that none of it is left in the cache."""


@dataclass(frozen=True)
class Shape:
    """One layer's attention."""

    name: str
    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype = torch.bfloat16
    kept: torch.dtype | None = None  # of the cache, if it is another
    block: int = 16
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


LLAMA_8B, LLAMA_70B = Shape("llama-3-8b", 32, 8, 128), Shape("llama-3-70b", 64, 8, 128)
RIGHT = (
    LLAMA_8B,
    LLAMA_70B,
    replace(LLAMA_8B, name="float16, blocks of 32", dtype=torch.float16, block=32),
    replace(LLAMA_8B, name="fp8 K/V", kept=FP8),
    replace(LLAMA_8B, name="window", window=100),
    replace(LLAMA_8B, name="sinks, window", window=128, sinks=True, size=64),
    Shape("cap, size 256", 8, 4, 256, soft_cap=50.0),
    Shape("size 80", 8, 8, 80, torch.float16),
    Shape("size 96, one K/V head, float32", 12, 1, 96, torch.float32),
)


@dataclass
class Batch:
    """Trees over a paged cache."""

    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor
    caches: list[Tensor]
    rows: TreeRows
    context: int

    def attend(self, output: Tensor, plan: kernels.Plan, which: int = 0) -> None:
        """Launch tree attention over one of the caches."""
        s, cache = self.shape, self.caches[which]
        kernels.attend(
            self.query, self.key, self.value, cache[..., : s.size], cache[..., s.size :], self.rows, s.size**-0.5, output,
            most_rows=self.rows.most_rows, most_keys=self.rows.most_keys, plan=plan, window=s.window, soft_cap=s.soft_cap,
            sinks=self.sinks, scales=self.scales,
        )  # fmt: skip

    @property
    def sinks(self) -> Tensor | None:
        return torch.linspace(-1, 1, self.shape.heads, device=DEVICE) if self.shape.sinks else None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        return None if self.shape.kept is None else tuple(torch.full((1,), x, device=DEVICE) for x in (0.8, 1.25))

    def plan(self, splits: int | None = None) -> kernels.Plan:
        s = self.shape
        processors = 132 if INTERPRETED else torch.cuda.get_device_properties(0).multi_processor_count
        chosen = kernels.make_plan(
            len(self.rows.num_rows), self.rows.most_rows, s.heads, s.kv_heads, s.size, self.context, processors
        )
        return chosen if splits is None else replace(chosen, splits=splits)


def random_tree(nodes: int, generator: torch.Generator) -> DraftTree:
    parents = [-1] + [int(torch.randint(0, row, (1,), generator=generator)) for row in range(1, nodes + 1)]
    return DraftTree.build(list(range(nodes + 1)), parents)


def make(shape: Shape, contexts: list[int], nodes: list[int], sets: int = 1, gap: int = 0) -> Batch:
    """Draw a batch; `gap` rows of other requests stand behind each tree."""
    generator = torch.Generator().manual_seed(shape.size + len(nodes))
    trees = [random_tree(n, generator) for n in nodes]
    counts = torch.tensor([tree.size + 1 + gap for tree in trees])
    starts, total = (counts.cumsum(0) - counts).int(), int(counts.sum())
    pages, kept = -(-max(contexts) // shape.block), shape.kept or shape.dtype
    table = torch.randperm(len(trees) * pages, generator=generator).reshape(len(trees), pages).int()

    def draw(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(sizes, device=DEVICE, dtype=torch.float32 if INTERPRETED else shape.dtype).to(dtype)

    caches = [draw(table.numel(), shape.block, shape.kv_heads, 2 * shape.size, dtype=kept).transpose(1, 2) for _ in range(sets)]
    rows = TreeRows.of_trees(trees, starts, torch.tensor(contexts, dtype=torch.int32), table).to(DEVICE)
    query = draw(total, shape.heads, shape.size, dtype=shape.dtype)
    key, value = (draw(total, shape.kv_heads, shape.size, dtype=kept) for _ in range(2))
    return Batch(shape, query, key, value, caches, rows, max(contexts))


# Right ----------------------------------------------------------------------------------------------------------------


def check(shape: Shape, splits: int) -> dict[str, Any]:
    """Compare with the float32 reference on the CPU; rows of no tree must stay as they were."""
    if INTERPRETED:  # one K/V head shows what all do
        shape = replace(shape, heads=shape.heads // shape.kv_heads, kv_heads=1)
    contexts, nodes = ([0, 1, 40], [3, 0, 17]) if INTERPRETED else ([0, 1, 15, 16, 517, 3000], [8, 0, 25, 60, 63, 25])
    batch = make(shape, contexts, nodes, gap=2)
    got = torch.full_like(batch.query, float("nan"))
    batch.attend(got, batch.plan(splits))
    host = [x.cpu() for x in (batch.query.float(), batch.key, batch.value, batch.caches[0])]
    want = torch.full_like(host[0], float("nan"))
    ReferenceTreeAttention(PAIR_LAYOUT)(
        *host, batch.rows.to(torch.device("cpu")), shape.size**-0.5, want, window=shape.window, soft_cap=shape.soft_cap,
        sinks=None if batch.sinks is None else batch.sinks.cpu(), scales=(1.0, 1.0) if shape.kept is None else (0.8, 1.25),
    )  # fmt: skip
    got = got.float().cpu()
    untouched = bool((got.isnan() == want.isnan()).all())
    error = float((got - want).nan_to_num().norm() / want.nan_to_num().norm())
    return {"case": shape.name, "splits": splits, "error": error, "ok": untouched and error < CLOSE[shape.dtype]}


def check_commit(kept: torch.dtype) -> dict[str, Any]:
    """Compare the commit with an assignment by index."""
    layers, rows, places, size, block = (2, 5, 4, 16, 16) if INTERPRETED else (32, 300, 200, 128, 16)
    caches = [torch.randn(40, 8, block, 2 * size, device=DEVICE).to(kept) for _ in range(layers)]
    mine = torch.randn(layers, 2, rows, 8, size, device=DEVICE).to(kept)
    source = torch.randint(-1, rows, (places,), device=DEVICE)
    slots = torch.randperm(40 * block, device=DEVICE)[:places][None]
    slots[0, 0] = -1
    want = [cache.clone() for cache in caches]
    there = (source >= 0) & (slots[0] >= 0)
    for layer, cache in enumerate(want):
        pair = torch.cat((mine[layer, 0], mine[layer, 1]), dim=-1).view(torch.uint8 if kept == FP8 else kept)
        cache.view(pair.dtype)[slots[0][there] // block, :, slots[0][there] % block] = pair[source[there]]
    commit(mine, caches, source, slots)
    same = all(torch.equal(a.float(), b.float()) for a, b in zip(caches, want, strict=True))
    return {"case": f"commit, {kept}", "splits": 1, "error": 0.0 if same else 1.0, "ok": same}


def commit(kept: Tensor, caches: list[Tensor], source: Tensor, slots: Tensor) -> None:
    group = torch.zeros(len(caches), dtype=torch.int32, device=DEVICE)
    kernels.commit(kept, torch.tensor([c.data_ptr() for c in caches], device=DEVICE), caches[0], source, slots, group)


# Fast -----------------------------------------------------------------------------------------------------------------


def microseconds(launch: Callable[[int], None], sets: int, rounds: int = 7) -> float:
    """Return the median time of a launch: a CUDA graph goes over all sets, so that no launch finds its context in the cache."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for which in range(sets):
            launch(which)
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / sets)
    return statistics.median(times)


def bandwidth() -> float:
    """Return bytes a second of a large copy, read and written."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (1e-6 * microseconds(lambda _: target.copy_(source), 1))


def causal(batch: Batch, sets: int) -> float | None:
    """Time torch's FlashAttention on the same rows: as many queries, the context and the rows as keys, causal at the end.

    None where this torch has no such operation.
    """
    s, requests, rows = batch.shape, len(batch.rows.num_rows), batch.rows.most_rows
    query = batch.query.view(requests, rows, s.heads, s.size).transpose(1, 2)
    shape = (requests, s.kv_heads, batch.context + rows, s.size)
    keys = [torch.randn(shape, device=DEVICE, dtype=s.dtype) for _ in range(sets)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    try:
        flash(query, keys[0], keys[0], 0.0, True)
    except (NotImplementedError, RuntimeError, TypeError) as failed:
        print(f"no FlashAttention to compare with: {str(failed).splitlines()[0]}", flush=True)
        return None
    return microseconds(lambda which: flash(query, keys[which], keys[which], 0.0, True), sets)


def measure(
    shape: Shape, context: int, requests: int, nodes: int, speed: float, plan: kernels.Plan | None = None
) -> dict[str, Any]:
    """Time a batch of equal trees."""
    kept = 2 * requests * context * shape.kv_heads * shape.size * (shape.kept or shape.dtype).itemsize
    sets = max(1, min(16, -(-SET // kept)))
    batch = make(shape, [context] * requests, [nodes] * requests, sets)
    output = torch.empty_like(batch.query)
    plan = plan or batch.plan()
    ours = microseconds(lambda which: batch.attend(output, plan, which), sets)
    rest = sum(x.numel() * x.element_size() for x in (batch.query, output, batch.key, batch.value))
    theirs = causal(batch, sets)
    floor = 1e6 * (kept + rest) / speed
    return {
        "model": shape.name, "context": context, "requests": requests, "nodes": nodes, "splits": plan.splits,
        "tree_us": round(ours, 1), "causal_us": theirs and round(theirs, 1), "floor_us": round(floor, 1),
        "ratio": theirs and round(ours / theirs, 2), "of_bandwidth": round(floor / ours, 2),
        "plan": [plan.tile, plan.step, plan.splits, plan.warps, plan.stages],
    }  # fmt: skip


def measure_commit(speed: float) -> dict[str, Any]:
    """Time the commit of 64 requests that accept 4 of 25 nodes each, in all of Llama-3-8B's layers."""
    layers, rows, places = 32, 64 * 26, 64 * 5
    caches = [torch.randn(512, 16, 8, 256, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(layers)]
    kept = torch.randn(layers, 2, rows, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    source = torch.where(torch.arange(places, device=DEVICE) % 5 < 4, torch.randint(0, rows, (places,), device=DEVICE), -1)
    slots = torch.randperm(512 * 16, device=DEVICE)[:places][None]
    addresses = torch.tensor([c.data_ptr() for c in caches], device=DEVICE)
    group = torch.zeros(layers, dtype=torch.int32, device=DEVICE)
    took = microseconds(lambda _: kernels.commit(kept, addresses, caches[0], source, slots, group), 1)
    moved = 2 * layers * 64 * 4 * 2 * 8 * 128 * 2
    return {"commit_us": round(took, 1), "floor_us": round(1e6 * moved / speed, 1)}


def show(found: dict[str, Any]) -> None:
    line = (
        "{model:12} context {context:6} requests {requests:3} nodes {nodes:3} splits {splits:3}: tree {tree_us:9.1f} us,"
        " causal {causal_us!s:>9} us, x{ratio!s:5}; {of_bandwidth:.0%} of bandwidth"
    )
    print(line.format(**found), flush=True)


def sweep(speed: float, until: float) -> list[dict[str, Any]]:
    """Try other tiles and depths of the pipeline where it matters."""
    found = []
    for context, requests, nodes in ((2048, 64, 25), (8192, 1, 25), (32768, 8, 60)):
        for tile, step, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            if time.monotonic() > until:
                return found
            chosen = make(LLAMA_8B, [context] * requests, [nodes] * requests).plan()
            plan = replace(chosen, tile=tile, step=step, warps=warps, stages=stages)
            try:
                found.append(measure(LLAMA_8B, context, requests, nodes, speed, plan))
            except Exception as failed:  # more shared memory or registers than there are: a result, too
                print(f"{plan}: {type(failed).__name__}", flush=True)
                continue
            show(found[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=210, help="no case begins later than this")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not INTERPRETED and not torch.cuda.is_available():
        print("no GPU here; TRITON_INTERPRET=1 checks the kernels without one, and measures nothing", file=sys.stderr)
        return 2
    began = time.monotonic()
    right = [check(shape, splits) for shape in RIGHT for splits in (1, 2 if INTERPRETED else 8)]
    right += [check_commit(kept) for kept in (torch.bfloat16, FP8)]
    for one in right:
        print("{ok!s:5} error {error:.1e}, splits {splits}: {case}".format(**one), flush=True)
    result: dict[str, Any] = {"device": "Triton's interpreter, on a CPU", "right": right, "cases": [], "not_run": 0}
    if not INTERPRETED:
        speed = bandwidth()
        result |= {"device": torch.cuda.get_device_name(), "copy_gb_s": round(speed / 1e9), "commit": measure_commit(speed)}
        print("copy {copy_gb_s} GB/s; commit {commit[commit_us]} us, floor {commit[floor_us]} us".format(**result))
        for case in itertools.product((LLAMA_8B, LLAMA_70B), (512, 2048, 8192, 32768), (1, 8, 64), (8, 25, 60)):
            if time.monotonic() - began > args.seconds:
                result["not_run"] += 1
                continue
            result["cases"].append(measure(*case, speed))
            show(result["cases"][-1])
        if args.sweep:
            result["sweep"] = sweep(speed, time.monotonic() + 2 * args.seconds)
    versions = {"torch": torch.__version__, "triton": kernels.triton.__version__, "seconds": round(time.monotonic() - began)}
    print(json.dumps(result | versions))
    return 0 if all(one["ok"] for one in right) else 1


if __name__ == "__main__":
    sys.exit(main())

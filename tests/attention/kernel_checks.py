"""What `test_kernels.py` has done in the interpreting process: Triton's kernels against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_eagle.attention import kernels
from vllm_eagle.attention.device import KeptRows, StaticRows, TritonTreeAttention
from vllm_eagle.attention.layout import PAIR_LAYOUT
from vllm_eagle.attention.reference import ReferenceTreeAttention
from vllm_eagle.tree import DraftTree, TreeRows

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
UNTOUCHED = 7.0


def random_tree(nodes: int, generator: torch.Generator) -> DraftTree:
    parents = [-1] + [int(torch.randint(0, row, (1,), generator=generator)) for row in range(1, nodes + 1)]
    return DraftTree.build(list(range(nodes + 1)), parents)


def compare(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    block: int = 16,
    *,
    splits: int = 1,
    step: int = 16,
    tile: int = 16,
    contexts: Sequence[int] | None = None,
    nodes: Sequence[int] = (3, 1, 17, 0),
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    fp8: bool = False,
    tokens_first: bool = True,
) -> None:
    """Compare a ragged batch: trees with other requests' rows between them, pages in any order, NaN where nothing is."""
    assert not isinstance(kernels._attend, kernels.triton.runtime.JITFunction), "this process compiles"
    generator = torch.Generator().manual_seed(heads * size + block)
    contexts = contexts or (0, 1, block, 3 * block + 7)
    trees, gap = [random_tree(n, generator) for n in nodes], 3
    sizes = torch.tensor([0] + [tree.size + 1 + gap for tree in trees[:-1]])
    starts, total = (sizes.cumsum(0) + 2).int(), 2 + sum(tree.size + 1 + gap for tree in trees)
    kept = FP8 if fp8 else dtype
    pages = -(-max(contexts) // block)
    table = torch.randperm(len(trees) * pages, generator=generator).reshape(len(trees), pages).int()
    shape = (table.numel(), block, kv_heads) if tokens_first else (table.numel(), kv_heads, block)
    cache = torch.randn(*shape, 2 * size, generator=generator).to(kept)
    cache = cache.transpose(1, 2) if tokens_first else cache
    spoil(cache, table, contexts, window)
    query = torch.randn(total, heads, size, generator=generator).to(dtype)
    key, value = (torch.randn(total, kv_heads, size, generator=generator).to(kept) for _ in range(2))
    rows = TreeRows.of_trees(trees, starts, torch.tensor(contexts, dtype=torch.int32), table)
    sink = torch.randn(heads, generator=generator) if sinks else None
    scales = (0.7, 1.3) if fp8 else (1.0, 1.0)
    want, got = torch.full_like(query, UNTOUCHED), torch.full_like(query, UNTOUCHED)
    reference = ReferenceTreeAttention(PAIR_LAYOUT)
    reference(query, key, value, cache, rows, size**-0.5, want, window=window, soft_cap=soft_cap, sinks=sink, scales=scales)
    kernels.attend(
        query, key, value, cache[..., :size], cache[..., size:], padded(rows), size**-0.5, got,
        most_rows=max(nodes) + 1, most_keys=max(nodes) + 1, plan=kernels.Plan(tile, step, splits, 4, 1), window=window,
        soft_cap=soft_cap, sinks=sink, scales=(torch.tensor([scales[0]]), torch.tensor([scales[1]])) if fp8 else None,
    )  # fmt: skip
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def spoil(cache: Tensor, table: Tensor, contexts: Sequence[int], window: int) -> None:
    """Put NaN behind the end of each context, and into blocks that lie before the root's window."""
    block = cache.shape[2]
    for pages, context in zip(table.tolist(), contexts, strict=True):
        for i, page in enumerate(pages):
            cache[page, :, max(0, context - i * block) :] = float("nan")
        for page in pages[: max(0, context + 1 - window) // block if window else 0]:
            cache[page] = float("nan")


def padded(rows: TreeRows) -> TreeRows:
    """Add a place without a tree, as in a batch padded to a fixed size; its numbers are another step's."""

    def more(values: Tensor, last: int) -> Tensor:
        return torch.cat((values, torch.tensor([last], dtype=values.dtype)))

    return replace(
        rows,
        query_start=more(rows.query_start, 1),
        num_rows=more(rows.num_rows, 0),
        first_word=more(rows.first_word, 0),
        key_start=more(rows.key_start, 1),
        context_len=more(rows.context_len, 9),
        block_table=torch.cat((rows.block_table, rows.block_table[:1])),
    )


def compare_level(splits: int) -> None:
    """Compare a level being drafted: rows that are not the tree's keys, keys in scratch with room between the requests."""
    generator = torch.Generator().manual_seed(splits)
    requests, width, stride, size, block = 3, 4, 12, 64, 16
    words = torch.randint(1, 1 << 9, (requests, width), generator=generator)
    context = torch.tensor([5, 33, 1], dtype=torch.int32)
    cache, table = torch.randn(9, 1, block, 2 * size, generator=generator), torch.arange(9).reshape(3, 3).int()
    query = torch.randn(requests * width, 4, size, generator=generator)
    key, value = (torch.randn(requests * stride, 1, size, generator=generator) for _ in range(2))
    rows = TreeRows.of_level(words, stride, context, table)
    want, got = torch.empty_like(query), torch.empty_like(query)
    ReferenceTreeAttention(PAIR_LAYOUT)(query, key, value, cache, rows, 0.1, want)
    kernels.attend(
        query, key, value, cache[..., :size], cache[..., size:], rows, 0.1, got,
        most_rows=width, most_keys=stride, plan=kernels.Plan(16, 16, splits, 4, 1),
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=4e-6, atol=4e-6)


def compare_finish(dtype: torch.dtype, sinks: bool) -> None:
    """Compare with the context's part done elsewhere: in the query's dtype, log-sums [H, T] infinite where there was none."""
    generator = torch.Generator().manual_seed(int(sinks))
    heads, kv_heads, size, block, contexts, nodes = 4, 2, 64, 16, (0, 20, 16), (2, 20, 5)
    trees = [random_tree(n, generator) for n in nodes]
    counts = torch.tensor([tree.size + 1 for tree in trees])
    starts, total = (counts.cumsum(0) - counts).int(), int(counts.sum())
    cache, table = torch.randn(6, kv_heads, block, 2 * size, generator=generator).to(dtype), torch.arange(6).reshape(3, 2).int()
    query = torch.randn(total, heads, size, generator=generator).to(dtype)
    key, value = (torch.randn(total, kv_heads, size, generator=generator).to(dtype) for _ in range(2))
    rows = TreeRows.of_trees(trees, starts, torch.tensor(contexts, dtype=torch.int32), table)
    sink = torch.randn(heads, generator=generator) if sinks else None
    want, got = torch.empty_like(query), torch.empty_like(query)
    ReferenceTreeAttention(PAIR_LAYOUT)(query, key, value, cache, rows, 0.125, want, sinks=sink)
    context, lse = torch.full_like(query, float("nan")), torch.full((heads, total), float("inf"))
    for r in range(1, 3):
        here = slice(int(starts[r]), int(starts[r] + counts[r]))
        past_key, past_value = PAIR_LAYOUT.gather(cache, table[r], contexts[r])
        past_key, past_value = (x.float().repeat_interleave(2, dim=1).transpose(0, 1) for x in (past_key, past_value))
        scores = query[here].float().transpose(0, 1) @ past_key.transpose(1, 2) * 0.125
        context[here] = (scores.softmax(-1) @ past_value).transpose(0, 1).to(dtype)
        lse[:, here] = scores.logsumexp(-1)
    kernels.finish(
        query, key, value, context, lse, rows, 0.125, got,
        most_rows=21, most_keys=21, plan=kernels.Plan(32, 16, 1, 4, 1), sinks=sink,
    )  # fmt: skip
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def compare_commit(dtype: torch.dtype, tokens_first: bool) -> None:
    """Compare with a loop: three layers, two groups of them with other blocks; places that hold nothing."""
    generator = torch.Generator().manual_seed(5)
    layers, rows, kv_heads, size, block, pages = 3, 7, 3, 40, 16, 4
    shape = (pages, block, kv_heads, 2 * size) if tokens_first else (pages, kv_heads, block, 2 * size)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(layers)]
    caches = [cache.transpose(1, 2) if tokens_first else cache for cache in caches]
    kept = torch.randn(layers, 2, rows, kv_heads, size, generator=generator).to(dtype)
    source = torch.tensor([3, -1, 6, 0, 2])
    slots = torch.tensor([[17, 18, 63, 0, -1], [5, 6, 7, 48, 9]])
    group = torch.tensor([0, 1, 0], dtype=torch.int32)
    want = [cache.clone() for cache in caches]
    for layer in range(layers):
        for row, slot in zip(source.tolist(), slots[int(group[layer])].tolist(), strict=True):
            if row >= 0 and slot >= 0:
                want[layer][slot // block, :, slot % block] = torch.cat((kept[layer, 0, row], kept[layer, 1, row]), dim=-1)
    kernels.commit(kept, torch.tensor([cache.data_ptr() for cache in caches]), caches[0], source, slots, group)
    for got, expected in zip(caches, want, strict=True):
        assert torch.equal(got.float(), expected.float())


def compare_step() -> None:
    """Compare what a runner does in a step: rows in place of a larger step's, attention, keeping, committing."""
    generator = torch.Generator().manual_seed(9)
    heads, kv_heads, size, block, contexts, starts = 4, 1, 64, 32, [520, 9, 40], [0, 6, 9]
    trees: list[DraftTree | None] = [random_tree(5, generator), None, random_tree(7, generator)]
    table = torch.randperm(51, generator=generator).reshape(3, 17).int()
    sizes = (size, size, 32)  # the last layer is unlike the others
    caches = {str(i): torch.randn(51, block, kv_heads, 2 * k, generator=generator).transpose(1, 2) for i, k in enumerate(sizes)}
    static = StaticRows(5, 64, torch.device("cpu"))
    static.fill([random_tree(63, generator)] * 5, range(0, 320, 64), [99] * 5)
    static.fill(trees, starts, contexts)
    rows, query = static.over(table), torch.randn(17, heads, size, generator=generator)
    key, value = (torch.randn(17, kv_heads, size, generator=generator) for _ in range(2))
    want, got = torch.full_like(query, UNTOUCHED), torch.full_like(query, UNTOUCHED)
    real = [tree for tree in trees if tree is not None]
    plain = TreeRows.of_trees(real, torch.tensor([0, 9]).int(), torch.tensor([520, 40]).int(), table[[0, 2]])
    ReferenceTreeAttention(PAIR_LAYOUT)(query, key, value, caches["0"], plain, 0.125, want)
    launched = []
    usual, kernels.make_plan = kernels.make_plan, lambda *sizes: launched.append(usual(*sizes)) or launched[-1]
    TritonTreeAttention(processors=2)(query, key, value, caches["0"], rows, 0.125, got)
    kernels.make_plan = usual
    assert launched[0].splits == 2
    torch.testing.assert_close(got, want, rtol=4e-6, atol=4e-6)

    kept, index = KeptRows(caches, {"0": 0, "1": 1, "2": 0}, 20), torch.tensor([*range(6), *range(9, 17)])
    source, slots = torch.tensor([2, -1, 7]), torch.tensor([[40, 41, 3], [70, 71, -1]])
    after = {name: cache.clone() for name, cache in caches.items()}
    for name, k in zip(caches, sizes, strict=True):
        kept.keep(name, key[..., :k] + int(name), value[..., :k], index)
        for row, at in zip(source.tolist(), slots[int(name == "1")].tolist(), strict=True):
            if row >= 0 and at >= 0:
                pair = torch.cat((key[index[row], :, :k] + int(name), value[index[row], :, :k]), dim=-1)
                after[name][at // block, :, at % block] = pair
    kept.commit(source, slots)
    for name, cache in caches.items():
        assert torch.equal(cache, after[name]), name

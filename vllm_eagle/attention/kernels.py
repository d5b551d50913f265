"""Tree attention and the commit of accepted K/V in Triton, over any paged cache given by its strides.

Definition: `reference.py`. It imports torch and Triton alone: machines without vLLM can run it (`benchmarks/gpu/check.py`).

    one launch      context of a tree, tile by tile, then the tree's own keys            (enough programs to fill the chip)
    two launches    `_attend` over parts of the context, each leaving output and LSE;    (few requests, long contexts)
                    `_finish` adds the tree's keys and merges all parts
    beside vLLM's   FlashAttention leaves output and LSE of the context; `_finish` does the rest

A program holds a tile of queries: all heads of a K/V head's group, for as many tree rows as fit; each K/V tile it reads serves
all of them. What a row sees of the tree is one 64-bit word. Scores are kept in base 2.

Shapes: `R` trees, `T` tree rows of all trees, `H` heads, `G` K/V heads, `K` head size, `S` splits of the context, `L` layers,
`A` places of accepted nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from vllm_eagle.tree.rows import TreeRows

LOG2E = tl.constexpr(1.4426950408889634)
MINUS_INF = tl.constexpr(float("-inf"))
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Plan:
    """How a launch is dealt out; chosen on the host from sizes alone, so that it stays fixed in a CUDA graph."""

    tile: int  # queries of a program
    step: int  # context tokens read at a time
    splits: int  # parts of the context
    warps: int
    stages: int


def make_plan(trees: int, most_rows: int, heads: int, kv_heads: int, size: int, longest: int, processors: int) -> Plan:
    """Choose tiles, and as many parts of the context as fill `processors` twice, of 256 tokens at least."""
    queries = most_rows * (heads // kv_heads)
    tile = min(128 if size <= 128 else 64, max(16, triton.next_power_of_2(queries)))
    programs = trees * kv_heads * -(-queries // tile)
    wanted = max(1, min(-(-2 * processors // programs), longest // 256, 64))
    splits = 1 << (wanted.bit_length() - 1)
    return Plan(tile, 64 if size <= 128 else 32, splits, 8 if tile * size > 64 * 128 else 4, 3)


def attend(
    query: Tensor,
    tree_key: Tensor,
    tree_value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: TreeRows,
    scale: float,
    output: Tensor,
    *,
    most_rows: int,
    most_keys: int,
    plan: Plan,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write attention of all tree rows into `output`; other rows stay as they are.

    query, output [*, H, K]; tree_key, tree_value [*, G, K], in the cache's dtype; key_cache, value_cache [blocks, G, block, K]
    in any strides; `most_rows` and `most_keys` are the most query and key rows of a tree. `sinks` [H] are scores without a
    value. `scales`: factors [1] of keys and of values, for fp8 K/V.
    """
    shared = _arguments(query, tree_key, tree_value, rows, scale, output, most_keys, plan, window, soft_cap, sinks, scales)
    assert key_cache.stride(3) == value_cache.stride(3) == 1
    kv_heads, tiles = tree_key.shape[1], _tiles(query, tree_key, most_rows, plan)
    partial, lse = output, output
    if plan.splits > 1:
        places = min(len(rows.words), len(rows.num_rows) * most_rows)
        partial = torch.empty((plan.splits, places, *query.shape[1:]), dtype=torch.float32, device=query.device)
        lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=query.device)
    _attend[(tiles, kv_heads * plan.splits, len(rows.num_rows))](
        **shared,
        key_cache=key_cache,
        value_cache=value_cache,
        partial=partial,
        lse=lse,
        block_table=rows.block_table,
        table_stride=rows.block_table.stride(0),
        page_stride=key_cache.stride(0),
        page_head_stride=key_cache.stride(1),
        page_token_stride=key_cache.stride(2),
        value_page_stride=value_cache.stride(0),
        value_head_stride=value_cache.stride(1),
        value_token_stride=value_cache.stride(2),
        split_stride=partial.stride(0),
        lse_split_stride=lse.stride(0),
        heads=query.shape[1],
        splits=plan.splits,
        BLOCK=key_cache.shape[2],
        STEP=plan.step,
        ALONE=plan.splits == 1,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    if plan.splits > 1:
        _merge(shared, partial, lse, (lse.stride(0), lse.stride(1), lse.stride(2)), plan, (tiles, kv_heads, len(rows.num_rows)))


def finish(
    query: Tensor,
    tree_key: Tensor,
    tree_value: Tensor,
    context: Tensor,
    lse: Tensor,
    rows: TreeRows,
    scale: float,
    output: Tensor,
    *,
    most_rows: int,
    most_keys: int,
    plan: Plan,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Add the trees' own keys to attention over the context done elsewhere: `context` [T, H, K] and `lse` [H, T], natural.

    A row without context has an infinite `lse` of either sign. The rest is as in `attend`, whose windows are not known here.
    """
    shared = _arguments(query, tree_key, tree_value, rows, scale, output, most_keys, plan, 0, soft_cap, sinks, None)
    grid = (_tiles(query, tree_key, most_rows, plan), tree_key.shape[1], len(rows.num_rows))
    _merge(shared, context.unsqueeze(0), lse, (0, lse.stride(1), lse.stride(0)), plan, grid, splits=1)


def commit(kept: Tensor, caches: Tensor, like: Tensor, source: Tensor, slots: Tensor, group: Tensor) -> None:
    """Copy accepted rows into the paged caches of all layers: one launch, bytes as they are.

    kept [L, 2, T, G, K]: keys and values of this step's tree rows, in the cache's dtype; `caches` [L] int64: addresses of the
    layers' caches; `like` [blocks, G, block, 2K]: one of them, all have its strides; `source` [A] rows of `kept`, -1 for none;
    `slots` [groups, A] where they go, -1 for nowhere; `group` [L] int32: each layer's row of `slots`.
    """
    layers, _, _, kv_heads, size = kept.shape
    if len(source) == 0:
        return
    _commit[(source.shape[0], layers)](
        kept.view(torch.uint8) if kept.element_size() == 1 else kept,
        caches,
        source,
        slots,
        group,
        *kept.stride()[:3],
        *like.stride()[:3],
        slots.stride(0),
        SIZE=size,
        NUMBERS=kv_heads * size,
        WIDE=triton.next_power_of_2(kv_heads * size),
        BLOCK=like.shape[2],
    )


def _tiles(query: Tensor, tree_key: Tensor, most_rows: int, plan: Plan) -> int:
    return -(-most_rows * (query.shape[1] // tree_key.shape[1]) // plan.tile)


def _arguments(
    query: Tensor,
    tree_key: Tensor,
    tree_value: Tensor,
    rows: TreeRows,
    scale: float,
    output: Tensor,
    most_keys: int,
    plan: Plan,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
) -> dict[str, Any]:
    """Return what both kernels are told; tensors that are not there are given as `query`, and never read."""
    size = query.shape[2]
    for tensor in (query, tree_key, tree_value, output):
        assert tensor.stride(2) == 1 and (tensor.shape[1] == 1 or tensor.stride(1) == size), "heads lie side by side"
    return {
        "query": query,
        "tree_key": tree_key,
        "tree_value": tree_value,
        "output": output,
        "sinks": query if sinks is None else sinks,
        "key_scale": query if scales is None else scales[0],
        "value_scale": query if scales is None else scales[1],
        "query_start": rows.query_start,
        "num_rows": rows.num_rows,
        "first_word": rows.first_word,
        "key_start": rows.key_start,
        "context_len": rows.context_len,
        "words": rows.words,
        "scale": scale,
        "soft_cap": soft_cap,
        "query_stride": query.stride(0),
        "key_stride": tree_key.stride(0),
        "value_stride": tree_value.stride(0),
        "output_stride": output.stride(0),
        "GROUP": query.shape[1] // tree_key.shape[1],
        "SIZE": size,
        "WIDE": triton.next_power_of_2(size),
        "WINDOW": window,
        "CAPPED": soft_cap > 0,
        "SINKS": sinks is not None,
        "SCALED": scales is not None,
        "TILE": plan.tile,
        "KEYS": max(16, triton.next_power_of_2(most_keys)),
        "DOT": _dot_dtype(query.dtype),
    }


def _dot_dtype(dtype: torch.dtype) -> Any:
    """Return what products are made of: the query's dtype, but Triton's interpreter multiplies the bits of bfloat16."""
    interpreted = not isinstance(_attend, triton.runtime.JITFunction)
    return tl.float32 if interpreted and dtype == torch.bfloat16 else DTYPES[dtype]


def _merge(
    shared: dict[str, Any],
    partial: Tensor,
    lse: Tensor,
    lse_strides: tuple[int, int, int],
    plan: Plan,
    grid: tuple[int, int, int],
    splits: int | None = None,
) -> None:
    assert partial.stride(3) == 1
    _finish[grid](
        **shared,
        partial=partial,
        lse=lse,
        split_stride=partial.stride(0),
        row_stride=partial.stride(1),
        head_stride=partial.stride(2),
        lse_split_stride=lse_strides[0],
        lse_row_stride=lse_strides[1],
        lse_head_stride=lse_strides[2],
        splits=plan.splits if splits is None else splits,
        num_warps=plan.warps,
        num_stages=1,
    )


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(q, k, scale, soft_cap, CAPPED: tl.constexpr):
    """Score queries [M, K] against keys [N, K], in base 2."""
    s = _dot(q, tl.trans(k)) * scale
    if CAPPED:
        s = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / soft_cap)))  # tanh
    return s * LOG2E


@triton.jit
def _fold(acc, peak, total, scores, v):
    """Take scores [M, N] and values [N, K] into a running softmax; a row that sees nothing yet has the peak minus infinity."""
    high = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(high == MINUS_INF, 0.0, high)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    acc = acc * shrink[:, None] + _dot(weights.to(v.dtype), v)
    return acc, high, total * shrink + tl.sum(weights, 1)


@triton.jit
def _fold_part(acc, peak, total, part, part_peak):
    """Take another running softmax, normalised [M, K] with its log-sum [M], into ours."""
    high = tl.maximum(peak, part_peak)
    base = tl.where(high == MINUS_INF, 0.0, high)
    shrink, weight = tl.exp2(peak - base), tl.exp2(part_peak - base)
    return acc * shrink[:, None] + part * weight[:, None], high, total * shrink + weight


@triton.jit
def _fold_tree(
    acc, peak, total, q, word, tree_key, tree_value, key_at, key_stride, value_stride, scale, soft_cap,
    SIZE: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Take what rows see of their own tree into a running softmax: the bits of their words [M], in order of depth."""
    j, d = tl.arange(0, KEYS), tl.arange(0, WIDE)
    seen = ((word[:, None] >> j[None, :].to(tl.int64)) & 1).to(tl.int32)  # [M, KEYS]
    there = (tl.max(seen, 0) > 0)[:, None] & (d < SIZE)[None, :]
    at = key_at + j.to(tl.int64)
    k = tl.load(tree_key + at[:, None] * key_stride + d[None, :], mask=there, other=0.0)
    v = tl.load(tree_value + at[:, None] * value_stride + d[None, :], mask=there, other=0.0)
    visible = seen == 1
    if WINDOW > 0:  # an ancestor's depth is its place among the row's bits
        visible = visible & (tl.cumsum(seen, 1) > tl.sum(seen, 1)[:, None] - WINDOW)
    scores = tl.where(visible, _scores(q, k.to(DOT), scale, soft_cap, CAPPED), MINUS_INF)
    return _fold(acc, peak, total, scores, v.to(DOT))


@triton.jit
def _add_sink(acc, peak, total, sinks, head, valid):
    """Let a score without a value take its share of the softmax."""
    sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    return _fold_part(acc, peak, total, tl.zeros_like(acc), sink)


@triton.jit
def _depth(word):
    """Count the ancestors of rows with words [M]."""
    j = tl.arange(0, 64)
    return tl.sum(((word[:, None] >> j[None, :].to(tl.int64)) & 1).to(tl.int32), 1) - 1


@triton.jit
def _attend(
    query, tree_key, tree_value, output, sinks, key_scale, value_scale,
    query_start, num_rows, first_word, key_start, context_len, words, scale, soft_cap,
    query_stride, key_stride, value_stride, output_stride,
    key_cache, value_cache, partial, lse, block_table, table_stride,
    page_stride, page_head_stride, page_token_stride, value_page_stride, value_head_stride, value_token_stride,
    split_stride, lse_split_stride, heads, splits,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of a tree's queries to one part of its context; with one part alone, to the tree as well."""
    tile, tree = tl.program_id(0), tl.program_id(2)
    kv_head, split = tl.program_id(1) // splits, tl.program_id(1) % splits
    count = tl.load(num_rows + tree)
    if tile * TILE >= count * GROUP:
        return
    i, d = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDE)
    row, head, valid, inside = i // GROUP, kv_head * GROUP + i % GROUP, i < count * GROUP, d < SIZE
    both = valid[:, None] & inside[None, :]
    at = (tl.load(query_start + tree) + row).to(tl.int64)
    q = tl.load(query + at[:, None] * query_stride + (head * SIZE)[:, None] + d[None, :], mask=both, other=0.0).to(DOT)
    first = tl.load(first_word + tree)
    word = tl.load(words + first + row, mask=valid, other=0)
    if SCALED:
        scale = scale * tl.load(key_scale)

    acc = tl.zeros([TILE, WIDE], tl.float32)
    peak, total = tl.full([TILE], MINUS_INF, tl.float32), tl.zeros([TILE], tl.float32)
    context, seen_from = tl.load(context_len + tree), 0
    if WINDOW > 0:  # blocks before the root's window may be another request's by now
        seen_from = tl.maximum(context + 1 - WINDOW, 0)
        earliest = context + 1 - WINDOW + _depth(word)
    share = tl.cdiv(tl.cdiv(context - seen_from, STEP), splits) * STEP
    begin = seen_from + split * share
    end = tl.minimum(begin + share, context)
    for start in range(begin, end, STEP):
        token = start + tl.arange(0, STEP)
        there = token < end
        page = tl.load(block_table + tree * table_stride + token // BLOCK, mask=there, other=0).to(tl.int64)
        place, reading = (token % BLOCK).to(tl.int64), there[:, None] & inside[None, :]
        key_at = page * page_stride + kv_head * page_head_stride + place * page_token_stride
        value_at = page * value_page_stride + kv_head * value_head_stride + place * value_token_stride
        k = tl.load(key_cache + key_at[:, None] + d[None, :], mask=reading, other=0.0)
        v = tl.load(value_cache + value_at[:, None] + d[None, :], mask=reading, other=0.0)
        scores = _scores(q, k.to(DOT), scale, soft_cap, CAPPED)
        visible = there[None, :]
        if WINDOW > 0:
            visible = visible & (token[None, :] >= earliest[:, None])
        acc, peak, total = _fold(acc, peak, total, tl.where(visible, scores, MINUS_INF), v.to(DOT))

    if ALONE:
        acc, peak, total = _fold_tree(
            acc, peak, total, q, word, tree_key + kv_head * SIZE, tree_value + kv_head * SIZE,
            tl.load(key_start + tree).to(tl.int64), key_stride, value_stride, scale, soft_cap,
            SIZE, WIDE, WINDOW, CAPPED, KEYS, DOT,
        )  # fmt: skip
    if SCALED:
        acc = acc * tl.load(value_scale)
    if ALONE and SINKS:
        acc, peak, total = _add_sink(acc, peak, total, sinks, head, valid)
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if ALONE:
        tl.store(
            output + at[:, None] * output_stride + (head * SIZE)[:, None] + d[None, :],
            acc.to(output.dtype.element_ty),
            mask=both,
        )
    else:
        here = (first + row).to(tl.int64) * heads + head
        log_sum = tl.where(empty, MINUS_INF, (peak + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)
        tl.store(lse + split * lse_split_stride + here, log_sum, mask=valid)
        tl.store(partial + split.to(tl.int64) * split_stride + here[:, None] * SIZE + d[None, :], acc, mask=both)


@triton.jit
def _finish(
    query, tree_key, tree_value, output, sinks, key_scale, value_scale,
    query_start, num_rows, first_word, key_start, context_len, words, scale, soft_cap,
    query_stride, key_stride, value_stride, output_stride,
    partial, lse, split_stride, row_stride, head_stride, lse_split_stride, lse_row_stride, lse_head_stride, splits,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of a tree's queries to the tree's own keys, and merge with the parts of its context."""
    tile, kv_head, tree = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(num_rows + tree)
    if tile * TILE >= count * GROUP:
        return
    i, d = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDE)
    row, head, valid = i // GROUP, kv_head * GROUP + i % GROUP, i < count * GROUP
    both = valid[:, None] & (d < SIZE)[None, :]
    at = (tl.load(query_start + tree) + row).to(tl.int64)
    q = tl.load(query + at[:, None] * query_stride + (head * SIZE)[:, None] + d[None, :], mask=both, other=0.0).to(DOT)
    first = tl.load(first_word + tree)
    word = tl.load(words + first + row, mask=valid, other=0)
    if SCALED:
        scale = scale * tl.load(key_scale)
    acc = tl.zeros([TILE, WIDE], tl.float32)
    peak, total = tl.full([TILE], MINUS_INF, tl.float32), tl.zeros([TILE], tl.float32)
    acc, peak, total = _fold_tree(
        acc, peak, total, q, word, tree_key + kv_head * SIZE, tree_value + kv_head * SIZE,
        tl.load(key_start + tree).to(tl.int64), key_stride, value_stride, scale, soft_cap,
        SIZE, WIDE, WINDOW, CAPPED, KEYS, DOT,
    )  # fmt: skip
    if SCALED:
        acc = acc * tl.load(value_scale)
    here = (first + row).to(tl.int64)
    part_at = here * row_stride + head * head_stride
    for split in range(0, splits):
        part_peak = tl.load(
            lse + split * lse_split_stride + here * lse_row_stride + head * lse_head_stride, mask=valid, other=MINUS_INF
        )
        part_peak = tl.where(part_peak == float("inf"), MINUS_INF, part_peak) * LOG2E
        some = both & (part_peak > MINUS_INF)[:, None]
        part = tl.load(partial + part_at[:, None] + d[None, :], mask=some, other=0.0).to(tl.float32)
        acc, peak, total = _fold_part(acc, peak, total, part, part_peak)
        part_at += split_stride
    if SINKS:
        acc, peak, total = _add_sink(acc, peak, total, sinks, head, valid)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        output + at[:, None] * output_stride + (head * SIZE)[:, None] + d[None, :], acc.to(output.dtype.element_ty), mask=both
    )


@triton.jit
def _commit(
    kept, caches, source, slots, group,
    layer_stride, pair_stride, row_stride, page_stride, head_stride, token_stride, slots_stride,
    SIZE: tl.constexpr, NUMBERS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one accepted row's key and value into one layer's cache."""
    place, layer = tl.program_id(0), tl.program_id(1)
    row = tl.load(source + place).to(tl.int64)
    slot = tl.load(slots + tl.load(group + layer) * slots_stride + place).to(tl.int64)
    if (row >= 0) & (slot >= 0):
        n = tl.arange(0, WIDE)
        inside = n < NUMBERS
        cache = tl.load(caches + layer).to(tl.pointer_type(kept.dtype.element_ty))
        start = slot // BLOCK * page_stride + slot % BLOCK * token_stride
        to = start + n // SIZE * head_stride + n % SIZE
        pair = kept + layer.to(tl.int64) * layer_stride + row * row_stride + n
        tl.store(cache + to, tl.load(pair, mask=inside), mask=inside)
        tl.store(cache + to + SIZE, tl.load(pair + pair_stride, mask=inside), mask=inside)

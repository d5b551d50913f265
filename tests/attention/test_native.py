"""The compiled kernel against the reference: the same numbers for every shape a batch can take."""

from __future__ import annotations

import pytest
import torch

from vllm_eagle.attention.layout import VEC_LAYOUT
from vllm_eagle.attention.native import NativeTreeAttention
from vllm_eagle.attention.reference import ReferenceTreeAttention
from vllm_eagle.tree import DraftTree, TreeRows


def random_tree(nodes: int, generator: torch.Generator) -> DraftTree:
    parents = [-1] + [int(torch.randint(0, row, (1,), generator=generator)) for row in range(1, nodes + 1)]
    return DraftTree.build(list(range(nodes + 1)), parents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 80)])
@pytest.mark.parametrize("block", [32, 128])
def test_equals_reference(dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int) -> None:
    """Catches a wrong page, a wrong tail of the last block, a wrong ancestor, rows of another request's tree."""
    compare(dtype, heads, kv_heads, size, block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 1.5), (1, 0.0), (3, 0.0), (33, 0.0), (70, 0.4), (5000, 50.0)])
def test_windows_and_caps_equal_reference(dtype: torch.dtype, window: int, soft_cap: float) -> None:
    """Catches a window counted from the root instead of the row, or from the wrong end; and scores capped twice or unscaled."""
    compare(dtype, 6, 2, 64, 32, window=window, soft_cap=soft_cap)


def compare(dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int, **scoring: float) -> None:
    generator = torch.Generator().manual_seed(heads * size + block)
    contexts, nodes, gap = [0, 1, block - 1, block, block + 1, 3 * block + 7], [3, 1, 63, 0, 25, 60], 5
    trees = [random_tree(n, generator) for n in nodes]
    starts, total = [], 2
    for tree in trees:  # plain rows of other requests lie between the trees
        starts.append(total)
        total += tree.size + 1 + gap
    shape = torch.randn(40, kv_heads, block, 2 * size, generator=generator)
    cache = shape.to(dtype)
    table = torch.randperm(40, generator=generator)[:24].reshape(6, 4).int()
    query, key, value = (torch.randn(total, h, size, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads))
    rows = TreeRows.of_trees(trees, torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32), table)
    want, got = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
    ReferenceTreeAttention(VEC_LAYOUT)(query, key, value, cache, rows, size**-0.5, want, **scoring)
    NativeTreeAttention()(query, key, value, cache, rows, size**-0.5, got, **scoring)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(total, dtype=torch.bool)
    for start, tree in zip(starts, trees, strict=True):
        untouched[start : start + tree.size + 1] = False
    assert (got[untouched] == 7.0).all()


def test_masked_garbage_does_not_leak() -> None:
    """Catches NaN left in the unused tail of the last block reaching a row."""
    cache = torch.full((2, 1, 32, 64), float("nan"))
    keys, values = torch.randn(5, 1, 32), torch.randn(5, 1, 32)
    cache.view(2, 1, 2, -1)[1, :, 0].view(1, 32, 32)[:, :, :5] = keys.permute(1, 2, 0)
    cache.view(2, 1, 2, -1)[1, :, 1].view(1, 32, 32)[:, :5] = values.transpose(0, 1)
    rows = TreeRows.of_trees(
        [DraftTree.build([1], [-1])],
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32),
    )
    query, key, value, got = (torch.randn(1, 1, 32) for _ in range(4))
    NativeTreeAttention()(query, key, value, cache, rows, 0.2, got)
    all_keys, all_values = torch.cat((keys, key))[:, 0], torch.cat((values, value))[:, 0]
    want = (query[:, 0] @ all_keys.T * 0.2).softmax(-1) @ all_values
    torch.testing.assert_close(got[:, 0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 3, 20, 60])
def test_a_window_is_what_it_says(window: int) -> None:
    """Catches reference and kernel wrong in the same way, and a read of blocks the engine has taken back."""
    generator = torch.Generator().manual_seed(window)
    context, size, block = 75, 32, 32
    tree = DraftTree.build([1, 2, 3, 4, 5, 6], [-1, 0, 0, 2, 3, 1])
    keys, values = torch.randn(context, size, generator=generator), torch.randn(context, size, generator=generator)
    cache = torch.zeros(3, 1, block, 2 * size)
    pages = cache.view(3, 2, -1)
    for at in range(context):
        pages[at // block, 0].view(size, block)[:, at % block] = keys[at]
        pages[at // block, 1].view(block, size)[at % block] = values[at]
    for taken_back in range(max(0, context + 1 - window) // block):
        cache[taken_back] = float("nan")
    query, key, value = (torch.randn(6, 1, size, generator=generator) for _ in range(3))
    place = torch.tensor([0], dtype=torch.int32)
    rows = TreeRows.of_trees([tree], place, torch.tensor([context], dtype=torch.int32), torch.arange(3).int()[None])
    for attend in (NativeTreeAttention(), ReferenceTreeAttention(VEC_LAYOUT)):
        got = torch.empty_like(query)
        attend(query, key, value, cache, rows, 0.3, got, window=window)
        for row in range(6):
            path = [row]
            while path[0]:
                path.insert(0, int(tree.parents[path[0]]))
            seen = torch.cat((keys, key[path, 0]))[-window:], torch.cat((values, value[path, 0]))[-window:]
            want = (query[row, 0] @ seen[0].T * 0.3).softmax(-1) @ seen[1]
            torch.testing.assert_close(got[row, 0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [0, 3, 16, 60])
def test_a_row_does_not_depend_on_its_company(nodes: int) -> None:
    """Catches bits that change with the batch: how rows are dealt to tasks and tiles must not reorder any sum."""
    generator = torch.Generator().manual_seed(nodes)
    tree, batch, rows = random_tree(nodes, generator), 24, nodes + 1
    cache, table = torch.randn(batch * 3, 3, 32, 128, generator=generator), torch.arange(batch * 3).reshape(batch, 3).int()
    query, key, value = (torch.randn(batch * rows, h, 64, generator=generator) for h in (9, 3, 3))
    contexts = torch.arange(batch, dtype=torch.int32) * 4
    together, alone = torch.empty_like(query), torch.empty_like(query)
    attend = NativeTreeAttention()
    starts = torch.arange(batch, dtype=torch.int32) * rows
    attend(query, key, value, cache, TreeRows.of_trees([tree] * batch, starts, contexts, table), 0.125, together)
    for r in range(batch):
        one = TreeRows.of_trees([tree], starts[r : r + 1], contexts[r : r + 1], table[r : r + 1])
        attend(query, key, value, cache, one, 0.125, alone)
    assert torch.equal(together, alone)

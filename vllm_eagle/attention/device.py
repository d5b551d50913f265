"""Tree attention on a GPU, and what stays at fixed addresses there: the layout of a batch's trees, and the K/V they keep.

Shapes: `R` places for requests, `T` tree rows of all trees, `G` K/V heads, `K` head size, `A` accepted nodes at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm_eagle.tree import DraftTree, TreeRows


class TritonTreeAttention:
    """Attend through `kernels.py`: one launch, or two where few requests have long contexts; see `TreeAttention`."""

    def __init__(self, processors: int) -> None:
        """`processors` of the device, which a launch should fill; imports Triton."""
        from vllm_eagle.attention import kernels

        self._kernels, self._processors = kernels, processors

    def __call__(
        self,
        query: Tensor,
        tree_key: Tensor,
        tree_value: Tensor,
        cache: Tensor,
        rows: TreeRows,
        scale: float,
        output: Tensor,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """See `TreeAttention`; cache [blocks, G, block, 2K] in any strides, `sinks` [H] are scores without a value."""
        size, longest = query.shape[2], rows.longest or rows.block_table.shape[1] * cache.shape[2]
        sizes = (len(rows.num_rows), rows.most_rows, query.shape[1], tree_key.shape[1], size)
        self._kernels.attend(
            query,
            tree_key,
            tree_value,
            cache[..., :size],
            cache[..., size:],
            rows,
            scale,
            output,
            most_rows=rows.most_rows,
            most_keys=rows.most_keys,
            plan=self._kernels.make_plan(*sizes, min(window or longest, longest), self._processors),
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )

    def finish(
        self,
        query: Tensor,
        tree_key: Tensor,
        tree_value: Tensor,
        context: Tensor,
        lse: Tensor,
        rows: TreeRows,
        scale: float,
        output: Tensor,
        *,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """Add the trees' own keys to attention over the context, [T, H, K] with log-sums [H, T], done by another kernel."""
        sizes = (len(rows.num_rows), rows.most_rows, query.shape[1], tree_key.shape[1], query.shape[2])
        self._kernels.finish(
            query,
            tree_key,
            tree_value,
            context,
            lse,
            rows,
            scale,
            output,
            most_rows=rows.most_rows,
            most_keys=rows.most_keys,
            plan=self._kernels.make_plan(*sizes, 0, self._processors),
            soft_cap=soft_cap,
            sinks=sinks,
        )


class StaticRows:
    """Lay out the trees of each step in the same tensors: place r is the batch's request r, with no rows if it has no tree."""

    def __init__(self, requests: int, rows: int, device: torch.device) -> None:
        """`requests` of a batch at most, `rows` of a tree at most, the root counted."""
        pinned = device.type == "cuda"
        self._host = torch.zeros(5, requests + 1, dtype=torch.int32, pin_memory=pinned)
        self._host_words = torch.zeros(requests * rows, dtype=torch.int64, pin_memory=pinned)
        self._table, self._words = (
            torch.zeros_like(self._host, device=device),
            torch.zeros_like(self._host_words, device=device),
        )
        self._requests = self._most = self._longest = 0

    def fill(self, trees: Sequence[DraftTree | None], starts: Sequence[int], computed: Sequence[int]) -> None:
        """Take a step's trees, their roots' batch rows and the tokens in the cache before them; two copies to the device."""
        self._requests, counts = len(trees), [0 if tree is None else len(tree.tokens) for tree in trees]
        first = torch.tensor([0, *counts]).cumsum(0)
        contexts = [0 if tree is None else int(length) for tree, length in zip(trees, computed, strict=True)]
        here = slice(0, len(trees))
        self._host[0, here], self._host[1, here] = torch.as_tensor(starts), torch.tensor(counts)
        self._host[2, : len(trees) + 1], self._host[3, here] = first, torch.tensor(contexts)
        words = [torch.from_numpy(tree.words) for tree in trees if tree is not None]
        if words:
            torch.cat(words, out=self._host_words[: int(first[-1])])
        self._most, self._longest = max(counts, default=0), max(contexts, default=0)
        self._table.copy_(self._host, non_blocking=True)
        self._words.copy_(self._host_words, non_blocking=True)

    def over(self, block_table: Tensor) -> TreeRows:
        """Return the step's rows over the blocks [>= R, B] of a K/V cache group."""
        here = slice(0, self._requests)
        starts, counts, first, contexts = (self._table[i, here] for i in range(4))
        return TreeRows(
            starts, counts, first, starts, contexts, block_table[here], self._words, self._most, self._most, self._longest
        )

    @property
    def first_rows(self) -> Tensor:
        """Return the number of tree rows before each request [R + 1]."""
        return self._table[2, : self._requests + 1]


class KeptRows:
    """Keep keys and values of a step's tree rows, layer by layer, until the accepted ones go to the cache in one launch."""

    def __init__(self, caches: Mapping[str, Tensor], groups: Mapping[str, int], rows: int) -> None:
        """`caches` [blocks, G, block, 2K] of layers, `groups`: each layer's K/V cache group; most `rows` of all trees."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for name, cache in caches.items():
            alike.setdefault((cache.shape[1:], cache.stride(), cache.dtype), []).append(name)
        self._sets = [_LikeLayers({name: caches[name] for name in names}, groups, rows) for names in alike.values()]
        self._at = {name: (layers, i) for layers in self._sets for i, name in enumerate(layers.names)}

    def keep(self, layer: str, key: Tensor, value: Tensor, index: Tensor) -> None:
        """Take rows `index` [T] of a layer's keys and values [*, G, K]."""
        layers, i = self._at[layer]
        torch.index_select(key, 0, index, out=layers.kept[i, 0, : len(index)])
        torch.index_select(value, 0, index, out=layers.kept[i, 1, : len(index)])

    def commit(self, source: Tensor, slots: Tensor) -> None:
        """Write kept rows `source` [A] to `slots` [groups, A], -1 for none: one launch over all layers that are alike."""
        for layers in self._sets:
            layers.commit(source, slots)


class _LikeLayers:
    """Layers whose caches have the same shape and strides."""

    def __init__(self, caches: Mapping[str, Tensor], groups: Mapping[str, int], rows: int) -> None:
        self.names, self._caches = list(caches), list(caches.values())
        like = self._caches[0]
        shape = (len(caches), 2, rows, like.shape[1], like.shape[3] // 2)
        self.kept = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._addresses = torch.tensor([cache.data_ptr() for cache in self._caches], device=like.device)
        self._group = torch.tensor([groups[name] for name in self.names], dtype=torch.int32, device=like.device)

    def commit(self, source: Tensor, slots: Tensor) -> None:
        from vllm_eagle.attention import kernels

        kernels.commit(self.kept, self._addresses, self._caches[0], source, slots, self._group)

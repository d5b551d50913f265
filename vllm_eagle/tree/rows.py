"""Where the trees of a batch lie among the rows of one forward pass, and what each row may see.

The one input of every tree attention: of the target (verification) and of the head (drafting).
`R` trees, `T` tree rows of all trees, `B` blocks of the longest context.

    row of tree r, number i:   query   query_start[r] + i
                               sees    context positions 0 .. context_len[r]-1 of block_table[r]
                               and     key rows key_start[r] + j   for every bit j of words[first_word[r] + i]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from vllm_eagle.tree.draft_tree import MAX_NODES, DraftTree


@dataclass(frozen=True)
class TreeRows:
    """Describe the tree rows of a batch; all tensors int32 on the cache's device, but `words` (int64)."""

    query_start: Tensor  # [R] first query row
    num_rows: Tensor  # [R] query rows
    first_word: Tensor  # [R] cumulative sum of num_rows, from 0
    key_start: Tensor  # [R] first tree K/V row
    context_len: Tensor  # [R] tokens in the paged cache that every row of the tree sees
    block_table: Tensor  # [R, B] blocks of the context
    words: Tensor  # [T] bit j: tree K/V row key_start + j is the row itself or an ancestor
    most_rows: int = MAX_NODES + 1  # query rows of a tree at most, and
    most_keys: int = MAX_NODES + 1  # K/V rows: what a launch is made for
    longest: int | None = None  # context at most, None: whatever the block table holds

    @classmethod
    def of_trees(cls, trees: Sequence[DraftTree], starts: Tensor, context_len: Tensor, block_table: Tensor) -> TreeRows:
        """Lay out the trees to verify: rows root first from `starts` [R], K/V rows beside their queries."""
        counts = torch.tensor([tree.size + 1 for tree in trees], dtype=torch.int32)
        words = torch.cat([torch.from_numpy(tree.words) for tree in trees])
        most = int(counts.max())
        return cls(starts, counts, _exclusive_sum(counts), starts, context_len, block_table, words, most, most)

    @classmethod
    def of_level(cls, words: Tensor, key_stride: int, context_len: Tensor, block_table: Tensor) -> TreeRows:
        """Lay out one level being drafted: `words` [R, F], scratch K/V of `key_stride` rows a request."""
        requests, width = words.shape
        index = torch.arange(requests, dtype=torch.int32, device=words.device)
        counts = torch.full((requests,), width, dtype=torch.int32, device=words.device)
        starts = index * width
        return cls(starts, counts, starts, index * key_stride, context_len, block_table, words.reshape(-1), width, key_stride)

    def on(self, block_table: Tensor) -> TreeRows:
        """Return the same rows over the blocks of another K/V cache group."""
        return replace(self, block_table=block_table)

    def to(self, device: torch.device) -> TreeRows:
        """Return the same rows with their tensors on a device."""
        tensors: dict[str, Any] = {f.name: x.to(device) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        return replace(self, **tensors)


def _exclusive_sum(counts: Tensor) -> Tensor:
    return (counts.cumsum(0) - counts).to(torch.int32)

"""What both attention backends do in a batch with trees: trees and single rows to tree attention, prompts to vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_eagle.tree import TreeRows


@dataclass
class TreeBatch:
    """Ride on the metadata of a batch that holds trees."""

    attention: Any
    rows: TreeRows
    index: Tensor  # [T] batch rows of all trees, root first
    plain: Any  # vLLM's metadata of the rows outside trees, None if there are none
    plain_index: Tensor  # their batch rows

    def keep(self, layer: str, key: Tensor, value: Tensor) -> None:
        """Keep the tree rows of a layer's keys and values [*, G, K] until the accepted ones are committed."""
        raise NotImplementedError


class SendsTrees:
    """Stand before one of vLLM's attention implementations."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """See vLLM's `AttentionImpl.forward`."""
        trees: TreeBatch | None = getattr(attn_metadata, "trees", None)
        if trees is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if trees.plain is not None:
            rows = trees.plain_index
            plain = torch.empty_like(output[: len(rows)])
            super().forward(layer, query[rows], key, value, kv_cache, trees.plain, plain, *args, **kwargs)
            output[rows] = plain
        self._attend_trees(query, key, value, kv_cache, trees, output)
        trees.keep(layer.layer_name, key, value)
        return output

    def _attend_trees(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, trees: Any, output: Tensor) -> None:
        """Write the tree rows of `output`."""
        raise NotImplementedError

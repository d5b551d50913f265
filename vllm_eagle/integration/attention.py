"""vLLM's CPU attention backend, plus tree rows. Without trees in the batch it is vLLM's own, call for call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_eagle.attention import TreeAttention
from vllm_eagle.tree import TreeRows


@dataclass
class Trees:
    """Ride on the metadata of a batch that holds trees."""

    attention: TreeAttention
    rows: TreeRows
    index: Tensor  # [T] batch rows of all trees, root first
    plain: CPUAttentionMetadata | None  # of the rows outside trees, None if there are none
    plain_index: Tensor  # their batch rows
    kept: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Per layer: this step's key and value [T, G, K] of the tree rows, until the accepted ones are committed."""


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Send tree rows to tree attention and everything else to vLLM's op."""

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
        """See `CPUAttentionBackendImpl.forward`."""
        trees: Trees | None = getattr(attn_metadata, "trees", None)
        if trees is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if trees.plain is not None:
            rows = trees.plain_index
            plain = torch.empty_like(output[: len(rows)])
            super().forward(layer, query[rows], key, value, kv_cache, trees.plain, plain, *args, **kwargs)
            output[rows] = plain
        window, soft_cap = max(0, self.sliding_window), self.logits_soft_cap
        trees.attention(query, key, value, kv_cache, trees.rows, self.scale, output, window=window, soft_cap=soft_cap)
        trees.kept[layer.layer_name] = (key[trees.index], value[trees.index])
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Stand in for `CPU_ATTN` in processes that speculate with trees."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        """Name the implementation."""
        return TreeCPUAttentionImpl

"""vLLM's CPU attention backend, plus tree rows. Without trees in the batch it is vLLM's own, call for call."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_eagle.integration.tree_forward import SendsTrees, TreeBatch


@dataclass
class Trees(TreeBatch):
    """Keep keys and values by layer: [T, G, K] each."""

    kept: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep(self, layer: str, key: Tensor, value: Tensor) -> None:
        """See `TreeBatch`."""
        self.kept[layer] = key[self.index], value[self.index]


class TreeCPUAttentionImpl(SendsTrees, CPUAttentionBackendImpl):
    """Send tree rows to tree attention and everything else to vLLM's op."""

    def _attend_trees(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, trees: Trees, output: Tensor) -> None:
        window, soft_cap = max(0, self.sliding_window), self.logits_soft_cap
        trees.attention(query, key, value, cache, trees.rows, self.scale, output, window=window, soft_cap=soft_cap)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Stand in for `CPU_ATTN` in processes that speculate with trees."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        """Name the implementation."""
        return TreeCPUAttentionImpl

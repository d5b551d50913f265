"""vLLM's attention backends on CUDA, plus tree rows: not run on a GPU. Without trees in the batch they are vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_eagle.attention.device import KeptRows
from vllm_eagle.integration.tree_forward import SendsTrees, TreeBatch


@dataclass
class DeviceTrees(TreeBatch):
    """Keep keys and values in tensors that never move."""

    first_rows: Tensor  # [R + 1] int32, tree rows before each request
    kept: KeptRows

    def keep(self, layer: str, key: Tensor, value: Tensor) -> None:
        """See `TreeBatch`."""
        self.kept.keep(layer, key, value, self.index)


class _Trees(SendsTrees):
    """Send tree rows to tree attention and everything else to vLLM's kernels."""

    def _attend_trees(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, trees: DeviceTrees, output: Tensor
    ) -> None:
        window, cap = max(0, self.sliding_window[0] + 1), self.logits_soft_cap
        trees.attention(query, key, value, cache, trees.rows, self.scale, output, window=window, soft_cap=cap, sinks=self.sinks)


class TreeFlashAttentionImpl(_Trees, FlashAttentionImpl):
    """Leave the context of trees to FlashAttention, which hands out its log-sums, and add the trees' own keys."""

    def _attend_trees(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, trees: DeviceTrees, output: Tensor
    ) -> None:
        if self.sliding_window[0] >= 0 or not trees.rows.longest:  # its window counts rows, ours depths
            return super()._attend_trees(query, key, value, cache, trees, output)
        rows, size = trees.rows, self.head_size
        tree_query = query[trees.index]
        context, lse = flash_attn.flash_attn_varlen_func(
            q=tree_query,
            k=canonicalize_singleton_dim_strides(cache[..., :size].transpose(1, 2)),
            v=canonicalize_singleton_dim_strides(cache[..., size:].transpose(1, 2)),
            cu_seqlens_q=trees.first_rows,
            max_seqlen_q=rows.most_rows,
            seqused_k=rows.context_len,
            max_seqlen_k=rows.longest,
            softmax_scale=self.scale,
            causal=False,
            block_table=rows.block_table,
            softcap=self.logits_soft_cap,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
        )[:2]
        cap, sinks = self.logits_soft_cap, self.sinks
        trees.attention.finish(query, key, value, context, lse, rows, self.scale, output, soft_cap=cap, sinks=sinks)


class TreeTritonAttentionImpl(_Trees, TritonAttentionImpl):
    """Give trees to our kernels, context and all."""


class _TreeFlashBuilder(FlashAttentionMetadataBuilder):
    """Keep attention out of CUDA graphs, which capture what is around it: the widest tree of a step sizes its launch."""

    _cudagraph_support = AttentionCGSupport.NEVER


class _TreeTritonBuilder(TritonAttentionMetadataBuilder):
    """Keep attention out of CUDA graphs, as above."""

    _cudagraph_support = AttentionCGSupport.NEVER


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """Stand in for `FLASH_ATTN` in processes that speculate with trees."""

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        """Name the implementation."""
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[_TreeFlashBuilder]:
        """Name the builder."""
        return _TreeFlashBuilder


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """Stand in for `TRITON_ATTN` in processes that speculate with trees."""

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        """Name the implementation."""
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[_TreeTritonBuilder]:
        """Name the builder."""
        return _TreeTritonBuilder

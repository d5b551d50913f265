"""Attention of tree rows: the whole paged context, and a row's ancestors among the tree's own keys."""

from vllm_eagle.attention.base import TreeAttention
from vllm_eagle.attention.layout import PAIR_LAYOUT, VEC_LAYOUT, PagedLayout
from vllm_eagle.attention.registry import choose

__all__ = ["PAIR_LAYOUT", "VEC_LAYOUT", "PagedLayout", "TreeAttention", "choose"]

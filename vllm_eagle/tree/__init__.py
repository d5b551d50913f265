"""Draft trees: the type, how it grows, and how its rows lie in a batch."""

from vllm_eagle.tree.draft_tree import MAX_NODES, DraftTree
from vllm_eagle.tree.growth import DynamicGrowth, Growth, StaticGrowth, chain, read_static
from vllm_eagle.tree.pool import CandidatePool
from vllm_eagle.tree.rows import TreeRows

__all__ = [
    "MAX_NODES",
    "CandidatePool",
    "DraftTree",
    "DynamicGrowth",
    "Growth",
    "StaticGrowth",
    "TreeRows",
    "chain",
    "read_static",
]

"""The contract of tree attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vllm_eagle.tree.rows import TreeRows


class TreeAttention(Protocol):
    """Attend from tree rows; rows that belong to no tree are left untouched in `output`."""

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
    ) -> None:
        """Write softmax(scale * q K^T) V of every tree row into `output`.

        With a `window` a row at position p sees positions p - window + 1 .. p alone, in the context and among its
        ancestors; with a `soft_cap` c scores s become c * tanh(s / c). 0 is none.

        query and output [*, H, K]; tree_key and tree_value [*, G, K] (H a multiple of G);
        cache [blocks, G, block, 2K], one layer's paged K/V. Accumulates in float32.
        """
        ...

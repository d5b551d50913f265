"""What training, drafting and serving ask of a head, whichever kind it is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vllm_eagle.heads.layers import Attend


class Head(Protocol):
    """Fuse what the target shows, step from feature to feature, read tokens out of a feature.

    Shapes: `...` leading dimensions, `D` hidden, `V` vocabulary, `S` draft vocabulary.
    """

    def embedding(self, shared: Tensor) -> Tensor:
        """Return the rows [V, D] that tokens are embedded with; `shared`, the target's, for a head without its own."""
        ...

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features [..., D] of true positions from the target's states there."""
        ...

    def __call__(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the next step's features [..., D] from embeddings one ahead [..., D], features and positions [...].

        `wanted` [W]: which rows, if not all are.
        """
        ...

    def readout(self, features: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the draft's logits: what the LM head reads [..., D], and its rows [S, D].

        `lm_head` [S, D] are the target's rows, for a head without rows of its own. The product is left to the caller,
        who may not want all of it at once.
        """
        ...

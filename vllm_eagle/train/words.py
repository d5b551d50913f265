"""The frozen ends of the target, whole and cut to a vocabulary.

Shapes: `V` vocabulary, `S` rows of a draft vocabulary, `D` hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_eagle.errors import EagleError
from vllm_eagle.train.features import Example
from vllm_eagle.train.target import Target
from vllm_eagle.train.vocabulary import places


@dataclass(frozen=True)
class Words:
    """Hold embedding [V, D], the LM head's rows of a draft vocabulary [S, D] and each token's place among them [V].

    `log_weights` [S] is added to the logits of a cross-entropy: a row that stands for many counts as many.
    """

    embedding: Tensor
    lm_head: Tensor
    places: Tensor
    log_weights: Tensor

    @property
    def vocabulary(self) -> Tensor:
        """Return the token of each row [S]."""
        tokens = (self.places >= 0).nonzero().squeeze(1)
        return tokens[self.places[tokens].argsort()]


@dataclass(frozen=True)
class Ends:
    """Hold the target's embedding [V, D] and LM head [V, D]."""

    embedding: Tensor
    lm_head: Tensor

    @classmethod
    def load(cls, model: Path) -> Ends:
        """Read both from the target in `model`; the rest of it is let go."""
        target = Target.load(model)
        return cls(target.embedding.clone(), target.lm_head.clone())

    def to(self, device: str) -> Ends:
        """Return the same on `device`."""
        return Ends(self.embedding.to(device), self.lm_head.to(device))

    def words(self, vocabulary: Tensor) -> Words:
        """Cut to a vocabulary [S]."""
        vocabulary = vocabulary.to(self.lm_head.device)
        weights = torch.zeros(len(vocabulary), device=self.lm_head.device)
        return Words(self.embedding, self.lm_head[vocabulary], places(vocabulary, len(self.lm_head)), weights)

    def check(self, examples: Sequence[Example], aux_layers: Sequence[int] = ()) -> None:
        """Raise `EagleError` when the features, or states of `aux_layers`, or tokens are not those of this target."""
        vocab, hidden = self.embedding.shape
        width = examples[0].features.shape[1] // max(1, len(aux_layers))
        if width != hidden:
            raise EagleError(f"the features are {width} wide, the target's embedding {hidden}; capture them with this target")
        largest = max(int(example.tokens.max()) for example in examples)
        if largest >= vocab:
            raise EagleError(f"token {largest} in the features is outside the target's vocabulary of {vocab}")

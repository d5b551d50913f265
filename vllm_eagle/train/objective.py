"""The loss of a rollout: what `fit` minimises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_eagle.train.rollout import Depth
from vllm_eagle.train.state import Record


@dataclass(frozen=True)
class Objective:
    """Weigh the parts: depth s counts decay^s · (feature_weight · SmoothL1(f̂, f) + token_weight · CE(p(f), q(f̂))).

    EAGLE-1, section 4.2: weights 1 and 0.1 at depth 0 alone. EAGLE-3, section 3: no feature part, decay 0.8.
    Rounds that no tree would hold are gone from the deeper depths (the idea of GRIFFIN's mask).
    """

    feature_weight: float
    token_weight: float
    decay: float

    def __call__(self, depths: Iterable[Depth], rounds: int) -> tuple[Tensor, Record]:
        """Return the loss and its figures; every depth is divided by all `rounds`, those dropped before it included."""
        total = torch.zeros(())
        record: Record = {"rounds": rounds}
        for s, depth in enumerate(depths):
            token = depth.scores.cross_entropy
            part = self.token_weight * token.sum()
            record[f"ce{s}"] = float(token.detach().mean())
            if self.feature_weight:
                feature = depth.feature_loss
                part = part + self.feature_weight * feature.sum()
                record[f"feature{s}"] = float(feature.detach().mean())
            total = total + self.decay**s / rounds * part
            record[f"hit{s}"] = float((depth.scores.rank == 0).float().mean())
            record[f"kept{s}"] = len(token) / rounds
        return total, record

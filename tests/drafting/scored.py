"""Look into trees as they are grown: which paths they hold, and with what scores."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_eagle.drafting.reference import Path
from vllm_eagle.tree import CandidatePool, DraftTree


class ScoredPool(CandidatePool):
    """Leave the log path values of the kept nodes where the test finds them."""

    scores: list[list[float]]

    def trees(self, roots: Tensor) -> list[DraftTree]:
        values = torch.cat(self._values, 1)
        ScoredPool.scores = values.gather(1, self.growth.keep(values)).tolist()
        return super().trees(roots)


def paths_of(tree: DraftTree) -> list[Path]:
    """Return the tokens from root to each node, the root left out."""
    paths: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]

"""The whole vocabulary at the price of a part: a batch's own candidates, and a sample of all other tokens.

Tokens no candidate of a batch names only matter through the sum over the vocabulary. A uniform sample of them, each
counted as many as it stands for, estimates that sum, so no token is left out of training and none is trained to be
drafted where the target never would.

Shapes: `V` vocabulary, `S` rows of a batch, `D` hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_eagle.train.batches import PackedBatch
from vllm_eagle.train.vocabulary import places
from vllm_eagle.train.words import Ends, Words


@dataclass(frozen=True)
class SampledVocabulary:
    """Cut the LM head to what a batch needs: `always` [A], its candidates, and `sample` others."""

    ends: Ends
    always: Tensor
    sample: int

    def words(self, batch: PackedBatch, seed: int) -> Words:
        """Return the words of one batch; the sample follows from `seed` alone."""
        size, device = len(self.ends.lm_head), self.ends.lm_head.device
        taken = torch.zeros(size, dtype=torch.bool)
        for tokens in (self.always, batch.top_ids.flatten(), batch.chosen):
            taken[tokens.cpu()] = True
        others = (~taken).nonzero().squeeze(1)
        drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[: self.sample]
        chosen = torch.cat((taken.nonzero().squeeze(1), others[drawn])).to(device)
        log_weights = torch.zeros(len(chosen), device=device)
        log_weights[len(chosen) - len(drawn) :] = math.log(max(1, len(others)) / max(1, len(drawn)))
        return Words(self.ends.embedding, self.ends.lm_head[chosen], places(chosen, size), log_weights)

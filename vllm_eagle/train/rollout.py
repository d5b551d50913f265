"""Score a head on every depth of every round of a batch: training and evaluation share this loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_eagle.heads import Head
from vllm_eagle.train.batches import PackedBatch
from vllm_eagle.train.loss import Scores, score
from vllm_eagle.train.unroll import RoundAttention, Rows, SlotAttention
from vllm_eagle.train.words import Words


@dataclass(frozen=True)
class Depth:
    """Hold one depth's outcome over the rounds still drafting."""

    batch: PackedBatch
    number: int
    rows: Rows
    out: Tensor  # [R', D] features the next depth reads
    scores: Scores

    @property
    def feature_loss(self) -> Tensor:
        """Return [R'] mean Smooth-L1 of the predicted features, for a head that predicts the target's."""
        guides = self.batch.guides[self.batch.start[self.rows.index + self.number]]
        return F.smooth_l1_loss(self.out, guides, reduction="none").mean(-1)


def rollout(head: Head, batch: PackedBatch, words: Words, depths: int, width: int, noise: Tensor | None) -> Iterator[Depth]:
    """Yield `depths` depths of all rounds.

    A round is dropped before depth s when its sequence ends there or when the token taken at depth s-1 was not among
    the head's best `width`: no tree of that width contains it. `noise` [N, D] is added to the target's states.
    """
    features = head.fuse(batch.features if noise is None else batch.features + noise)
    slots, embedding = SlotAttention(batch.slots), head.embedding(words.embedding)
    out = head(embedding[batch.tokens], features, batch.positions, slots)[batch.start]  # [R, D]
    rows = Rows.all_of(batch)
    attend = RoundAttention(batch, slots, rows)
    depth = _judge(head, out, batch, words, rows, 0)
    yield depth
    for s in range(1, depths):
        kept = (depth.scores.rank < width) & (batch.left[rows.index] > s)
        rows = rows.keep(kept, batch)
        if not len(rows.index):
            return
        attend.next_depth(kept, rows)
        place = batch.start[rows.index] + s
        out = head(embedding[batch.tokens[place]], out[kept], batch.positions[place], attend)
        depth = _judge(head, out, batch, words, rows, s)
        yield depth


def _judge(head: Head, out: Tensor, batch: PackedBatch, words: Words, rows: Rows, s: int) -> Depth:
    at = rows.index + s  # the round that starts s tokens later knows what comes after this one's depth s
    ids, taken = words.places[batch.top_ids[at]], words.places[batch.chosen[at]]
    hidden, lm_head = head.readout(out, words.lm_head)
    scores = score(hidden, lm_head, words.log_weights, ids, batch.top_probs[at], taken)
    return Depth(batch, s, rows, out, scores)


def uniform_noise(like: Tensor, size: float, seed: int) -> Tensor | None:
    """Return noise in ±`size` that follows from `seed` alone, or None for no noise."""
    if size == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    return ((torch.rand(like.shape, generator=generator) * 2 - 1) * size).to(like.device)

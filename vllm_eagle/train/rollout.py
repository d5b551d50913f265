"""Score a head on every depth of every round of a batch: training and evaluation share this loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_eagle.heads import Attend
from vllm_eagle.train.batches import PackedBatch
from vllm_eagle.train.loss import Scores, score
from vllm_eagle.train.unroll import RoundAttention, Rows, SlotAttention
from vllm_eagle.train.words import Words


class Head(Protocol):
    """Name what is called of a head, trainable or exported."""

    def __call__(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...


@dataclass(frozen=True)
class Depth:
    """Hold one depth's outcome over the rounds still drafting."""

    rows: Rows
    scores: Scores
    feature_loss: Tensor  # [R'] mean Smooth-L1 of the predicted feature


def rollout(head: Head, batch: PackedBatch, words: Words, depths: int, width: int, noise: Tensor | None) -> Iterator[Depth]:
    """Yield `depths` depths of all rounds.

    A round is dropped before depth s when its sequence ends there or when the token taken at depth s-1 was not among
    the head's best `width`: no tree of that width contains it. `noise` [N, D] is added to the true features.
    """
    features = batch.features if noise is None else batch.features + noise
    slots = SlotAttention(batch.slots)
    out = head(words.embedding[batch.tokens], features, batch.positions, slots)[batch.start]  # [R, D]
    rows = Rows.all_of(batch)
    attend = RoundAttention(batch, slots, rows)
    depth = _judge(out, batch, words, rows, 0)
    yield depth
    for s in range(1, depths):
        kept = (depth.scores.rank < width) & (batch.left[rows.index] > s)
        rows = rows.keep(kept, batch)
        if not len(rows.index):
            return
        attend.next_depth(kept, rows)
        place = batch.start[rows.index] + s
        out = head(words.embedding[batch.tokens[place]], out[kept], batch.positions[place], attend)
        depth = _judge(out, batch, words, rows, s)
        yield depth


def _judge(out: Tensor, batch: PackedBatch, words: Words, rows: Rows, s: int) -> Depth:
    at = rows.index + s  # the round that starts s tokens later knows what comes after this one's depth s
    ids, taken = words.places[batch.top_ids[at]], words.places[batch.chosen[at]]
    scores = score(out, words.lm_head, words.log_weights, ids, batch.top_probs[at], taken)
    feature_loss = F.smooth_l1_loss(out, batch.guides[batch.start[at]], reduction="none").mean(-1)
    return Depth(rows, scores, feature_loss)


def uniform_noise(like: Tensor, size: float, seed: int) -> Tensor | None:
    """Return noise in ±`size` that follows from `seed` alone, or None for no noise."""
    if size == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    return ((torch.rand(like.shape, generator=generator) * 2 - 1) * size).to(like.device)

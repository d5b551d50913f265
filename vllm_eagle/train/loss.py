"""Losses over the draft vocabulary; the logits of all rows are never in memory at once.

An LM head that is frozen has its product differentiated on the way forward. One that is trained (EAGLE-3) needs what
comes from above first, so its logits are computed again on the way back.

Shapes: `R` rows, `D` hidden, `S` draft vocabulary, `K` candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK = 512  # rows whose logits are in memory at once: 16 MB at 8,192 tokens, so they stay near the cache


@dataclass(frozen=True)
class Scores:
    """Hold the cross-entropy of each row and the rank of the token that was taken (0 = the head's first choice)."""

    cross_entropy: Tensor  # [R]; 0 where the token, or every candidate, is outside the draft vocabulary
    rank: Tensor  # [R]; S where the token is outside the draft vocabulary


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """Keep only d(loss)/d(hidden) [R, D] between forward and backward, never the logits [R, S]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, log_weights: Tensor, ids: Tensor, probs: Tensor, taken: Tensor
    ) -> Any:
        losses, ranks, grads = [], [], []
        for rows in torch.split(torch.arange(hidden.shape[0], device=hidden.device), _CHUNK):
            loss, rank, grad = _chunk(hidden[rows], lm_head, log_weights, ids[rows], probs[rows], taken[rows])
            losses.append(loss)
            ranks.append(rank)
            grads.append(grad)
        ctx.save_for_backward(torch.cat(grads))
        rank = torch.cat(ranks)
        ctx.mark_non_differentiable(rank)
        return torch.cat(losses), rank

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (saved,) = ctx.saved_tensors
        return saved * grads[0].unsqueeze(-1), None, None, None, None, None


def _chunk(
    hidden: Tensor, lm_head: Tensor, log_weights: Tensor, ids: Tensor, probs: Tensor, taken: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # loss = logsumexp(z) - sum_k p_k z_k with sum p = 1, so d(loss)/dz = softmax(z) - p.
    logits = hidden @ lm_head.T  # [R, S]
    rank = _rank(logits, taken)
    wanted = (logits.add_(log_weights).gather(1, ids) * probs).sum(1)
    peak = logits.amax(1, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(1, keepdim=True)
    loss = total.log().squeeze(1) + peak.squeeze(1) - wanted
    weights.div_(total).scatter_add_(1, ids, -probs)
    return loss, rank, weights @ lm_head


def _rank(logits: Tensor, taken: Tensor) -> Tensor:
    mine = logits.gather(1, taken.clamp_min(0).unsqueeze(1))
    return torch.where(taken >= 0, (logits > mine).sum(1), logits.shape[1])


def _plain_chunk(
    hidden: Tensor, lm_head: Tensor, log_weights: Tensor, ids: Tensor, probs: Tensor, taken: Tensor
) -> tuple[Tensor, Tensor]:
    logits = hidden @ lm_head.T  # [R, S]
    weighed = logits + log_weights
    return weighed.logsumexp(1) - (weighed.gather(1, ids) * probs).sum(1), _rank(logits, taken)


def _trained_head_cross_entropy(
    hidden: Tensor, lm_head: Tensor, log_weights: Tensor, ids: Tensor, probs: Tensor, taken: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep nothing of a chunk but its inputs between forward and backward."""
    chunks = zip(*(torch.split(rows, _CHUNK) for rows in (hidden, ids, probs, taken)), strict=True)
    scored = [checkpoint(_plain_chunk, h, lm_head, log_weights, i, p, t, use_reentrant=False) for h, i, p, t in chunks]
    return torch.cat([loss for loss, _ in scored]), torch.cat([rank for _, rank in scored])


def score(hidden: Tensor, lm_head: Tensor, log_weights: Tensor, ids: Tensor, probs: Tensor, taken: Tensor) -> Scores:
    """Compare hidden [R, D] through lm_head [S, D] with the target's candidates.

    `ids` [R, K] and `taken` [R] are rows of the draft vocabulary, -1 where a token is not in it; `probs` [R, K] are
    renormalised over the candidates that are. `log_weights` [S] (0 for candidates) are added to the logits. Gradients
    reach `lm_head` if it requires them.
    """
    inside = ids >= 0
    probs = torch.where(inside, probs, 0.0)
    probs = probs / probs.sum(1, keepdim=True).clamp_min(1e-9)
    compare = _trained_head_cross_entropy if lm_head.requires_grad else _FrozenHeadCrossEntropy.apply
    with torch.autocast(hidden.device.type, enabled=False):  # a softmax over a whole vocabulary needs float32
        loss, rank = compare(hidden.to(lm_head.dtype), lm_head, log_weights, ids.clamp_min(0), probs, taken)
    return Scores(torch.where((taken >= 0) & inside.any(1), loss, 0.0), rank)

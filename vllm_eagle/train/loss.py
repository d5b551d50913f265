"""Losses over the draft vocabulary; the LM head is frozen, so its product is differentiated on the way forward.

Shapes: `R` rows, `D` hidden, `S` draft vocabulary, `K` candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 512  # rows whose logits are in memory at once: 16 MB at 8,192 tokens, so they stay near the cache


@dataclass(frozen=True)
class Scores:
    """Hold the cross-entropy of each row and the rank of the token that was taken (0 = the head's first choice)."""

    cross_entropy: Tensor  # [R]
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
    mine = logits.gather(1, taken.clamp_min(0).unsqueeze(1))
    rank = torch.where(taken >= 0, (logits > mine).sum(1), logits.shape[1])
    wanted = (logits.add_(log_weights).gather(1, ids) * probs).sum(1)
    peak = logits.amax(1, keepdim=True)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(1, keepdim=True)
    loss = total.log().squeeze(1) + peak.squeeze(1) - wanted
    weights.div_(total).scatter_add_(1, ids, -probs)
    return loss, rank, weights @ lm_head


def score(hidden: Tensor, lm_head: Tensor, log_weights: Tensor, ids: Tensor, probs: Tensor, taken: Tensor) -> Scores:
    """Compare hidden [R, D] through lm_head [S, D] with the target's candidates.

    `ids` [R, K] and `taken` [R] are rows of the draft vocabulary, -1 where a token is not in it; `probs` [R, K] are
    renormalised over the candidates that are. `log_weights` [S] (0 for candidates) are added to the logits.
    """
    inside = ids >= 0
    probs = torch.where(inside, probs, 0.0)
    probs = probs / probs.sum(1, keepdim=True).clamp_min(1e-9)
    with torch.autocast(hidden.device.type, enabled=False):  # a softmax over a whole vocabulary needs float32
        hidden = hidden.to(lm_head.dtype)
        loss, rank = _FrozenHeadCrossEntropy.apply(hidden, lm_head, log_weights, ids.clamp_min(0), probs, taken)  # type: ignore[no-untyped-call]
    return Scores(loss, rank)

from __future__ import annotations

import pytest
import torch

from vllm_eagle.train import loss as module
from vllm_eagle.train.loss import score


def _case(rows: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    lm_head = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(rows)])
    probs = torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    return hidden, lm_head, ids, probs


def test_loss_and_gradient_are_those_of_plain_torch(monkeypatch: object) -> None:
    """Catches a wrong hand-written gradient, chunks put back in the wrong order, and absent candidates that count."""
    hidden, lm_head, ids, probs = _case()
    weights = torch.linspace(0, 2, 12, dtype=torch.float64)
    ids[2, 1] = ids[5, 0] = -1
    module._CHUNK, before = 3, module._CHUNK
    try:
        mine = hidden.clone().requires_grad_()
        scores = score(mine, lm_head, weights, ids, probs, ids[:, 2])
        (scores.cross_entropy * torch.arange(7)).sum().backward()
    finally:
        module._CHUNK = before
    plain = hidden.clone().requires_grad_()
    wanted = torch.zeros(7, 12, dtype=torch.float64)
    for row in range(7):
        for column in range(4):
            if ids[row, column] >= 0:
                wanted[row, ids[row, column]] = probs[row, column]
    wanted /= wanted.sum(1, keepdim=True)
    expected = -(wanted * (plain @ lm_head.T + weights).log_softmax(-1)).sum(1)
    (expected * torch.arange(7)).sum().backward()
    torch.testing.assert_close(scores.cross_entropy, expected)
    torch.testing.assert_close(mine.grad, plain.grad)


def test_a_trained_lm_head_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an LM head that gets no gradient, or that of the first chunk only; and one of a frozen head's that is another."""
    hidden, lm_head, ids, probs = _case()
    monkeypatch.setattr(module, "_CHUNK", 3)
    found = []
    for rows in (lm_head.clone().requires_grad_(), lm_head):
        mine = hidden.clone().requires_grad_()
        scores = score(mine, rows, torch.zeros(12), ids, probs, ids[:, 2])
        (scores.cross_entropy * torch.arange(7)).sum().backward()
        found.append((scores.cross_entropy.detach(), scores.rank, mine.grad, rows.grad))
    for trained, frozen in zip(found[0][:3], found[1][:3], strict=True):
        torch.testing.assert_close(trained, frozen)
    wanted = torch.zeros(7, 12, dtype=torch.float64).scatter_(1, ids, probs / probs.sum(1, keepdim=True))
    pulled = ((hidden @ lm_head.T).softmax(-1) - wanted) * torch.arange(7).unsqueeze(1)
    torch.testing.assert_close(found[0][3], pulled.T @ hidden)


@pytest.mark.parametrize("trained", [False, True])
def test_a_token_outside_teaches_nothing(trained: bool) -> None:
    """Catches a head trained to avoid every token it has, where the target took one it has not."""
    hidden, lm_head, ids, probs = _case(3)
    taken = ids[:, 0].clone()
    taken[0] = -1
    ids[1] = -1
    hidden.requires_grad_()
    scores = score(hidden, lm_head.requires_grad_(trained), torch.zeros(12), ids, probs, taken)
    scores.cross_entropy.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.norm(dim=1).tolist()[:2] == scores.cross_entropy.tolist()[:2] == [0.0, 0.0]
    assert float(hidden.grad[2].norm()) > 0


def test_rank_counts_better_tokens() -> None:
    """Catches a token outside the draft vocabulary that passes for a good guess."""
    hidden, lm_head, ids, probs = _case(2)
    order = (hidden[0] @ lm_head.T).argsort(descending=True)
    taken = torch.tensor([int(order[3]), -1])
    assert score(hidden, lm_head, torch.zeros(12), ids, probs, taken).rank.tolist() == [3, 12]

from __future__ import annotations

from pathlib import Path

import torch

from vllm_eagle.train.batches import pack
from vllm_eagle.train.features import Example
from vllm_eagle.train.target import head_config
from vllm_eagle.train.trainable import TrainableHead, Whitened
from vllm_eagle.train.words import Words


def test_whitened_inputs_have_no_direction_of_their_own() -> None:
    """Catches a basis on the wrong side, and an inverse that is not one."""
    torch.manual_seed(0)
    inputs = torch.randn(500, 6) @ torch.diag(torch.tensor([9.0, 1, 1, 0.1, 3, 1])) + 5
    whitened = Whitened(6)
    whitened.set_moment(inputs.T @ inputs / 500)
    white = inputs @ whitened.basis
    eigenvalues = torch.linalg.eigvalsh(white.T @ white / 500)
    assert float(eigenvalues.max()) < 1.01
    weight = torch.randn(4, 6)
    torch.testing.assert_close(whitened(whitened.right_inverse(weight)), weight)


def test_the_start_is_the_best_linear_guess(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches a start from the wrong inputs, or decoder layers that speak before they have learnt anything."""
    batches = [pack(toy_examples[:40]), pack(toy_examples[40:])]
    head = TrainableHead(head_config(toy_folder, 2))
    head.start_linear(batches, toy_words.embedding)
    x = torch.cat([torch.cat((toy_words.embedding[b.tokens], b.features), -1)[b.start] for b in batches])
    y = torch.cat([b.guides[b.start] for b in batches])
    best = torch.linalg.lstsq(x, y).solution
    mine = head(x[:, :32], x[:, 32:], torch.zeros(len(x), dtype=torch.long), lambda layer, q, k, v: torch.ones_like(q))
    assert float((mine - y).square().mean()) < 1.02 * float((x @ best - y).square().mean())

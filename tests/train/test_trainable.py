from __future__ import annotations

from pathlib import Path

import torch

from vllm_eagle.heads import Eagle3Head
from vllm_eagle.train.batches import pack
from vllm_eagle.train.features import Example
from vllm_eagle.train.target import head_config
from vllm_eagle.train.trainable import TrainableEagle1, TrainableEagle3, Whitened
from vllm_eagle.train.words import Ends, Words


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
    head = TrainableEagle1(head_config(toy_folder, 2))
    head.begin(batches, toy_words)
    x = torch.cat([torch.cat((toy_words.embedding[b.tokens], b.features), -1)[b.start] for b in batches])
    y = torch.cat([b.guides[b.start] for b in batches])
    best = torch.linalg.lstsq(x, y).solution
    mine = head(x[:, :32], x[:, 32:], torch.zeros(len(x), dtype=torch.long), lambda layer, q, k, v: torch.ones_like(q))
    assert float((mine - y).square().mean()) < 1.02 * float((x @ best - y).square().mean())


def test_an_eagle3_head_starts_from_the_targets_lm_head(
    toy_folder: Path, toy_states: list[Example], toy_draft_words: Words
) -> None:
    """Catches rows of other tokens, states of any scale passed on, and an export that loses the map or the basis."""
    batch = pack(toy_states)
    head = TrainableEagle3(head_config(toy_folder, 1, None, 60, (0, 1, 2)))
    head.begin([batch], toy_draft_words)
    fused = head.fuse(batch.features)
    assert 0.8 < float(fused.detach().square().mean()) < 1.2
    plain = head.exported()
    assert isinstance(plain, Eagle3Head)
    torch.testing.assert_close(plain.fuse(batch.features), fused.detach(), rtol=1e-4, atol=1e-4)
    assert plain.vocabulary.tolist() == toy_draft_words.vocabulary.tolist()
    ends = Ends.load(toy_folder)
    torch.testing.assert_close(plain.lm_head.weight, ends.lm_head[plain.vocabulary])

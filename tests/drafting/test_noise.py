"""Shared noise: it is the noise the engine draws with, and reading it ahead moves nothing."""

from __future__ import annotations

import pytest
import torch

from vllm_eagle.drafting import DraftVocabulary, Draws
from vllm_eagle.drafting.noise import gumbel, peek


def test_peeking_reads_what_is_drawn_next_and_moves_nothing() -> None:
    """Catches a generator advanced by the drafter, and integers read in another way than the sampler reads them."""
    generator = torch.Generator().manual_seed(7)
    torch.randint(0, 2**31, (1,), generator=generator)
    ahead = peek(generator, 5)
    drawn = [int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)) for _ in range(5)]
    assert ahead.tolist() == drawn
    assert len(set(drawn)) == 5


def test_the_noise_is_gumbel_and_independent() -> None:
    """Catches noise of another law, or noise shared by tokens or by neighbouring seeds."""
    noise = gumbel(torch.arange(400), torch.arange(500)).double()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, abs=0.02)
    assert torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1].abs() < 0.01
    assert torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))[0, 1].abs() < 0.01
    some = torch.tensor([3, 77, 400])
    assert torch.equal(gumbel(torch.tensor([9]), some)[0], gumbel(torch.tensor([9]), torch.arange(500))[0, some])


def test_it_is_the_engines_own() -> None:
    """Catches a constant or a shift of SplitMix64 that is not vLLM's: every draw of 64 rows of 5,000 tokens."""
    import vllm._custom_ops  # noqa: F401

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 5000, generator=generator) * 3
    seeds = torch.randint(0, 2**31, (64,), generator=generator)
    assert torch.equal(torch.ops._C.fused_gumbel_argmax(logits, seeds), (logits + gumbel(seeds, torch.arange(5000))).argmax(1))


def test_candidates_are_ranked_by_what_will_be_drawn() -> None:
    """Catches noise of another request, level or token, a temperature left out, and noise on greedy requests."""
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(1))  # 3 requests, 2 nodes each
    tokens = torch.arange(100, 150)
    draws = Draws(torch.tensor([0.0, 0.7, 1.4]), torch.arange(12).view(3, 4))
    found, logprobs = DraftVocabulary(lambda features: features, tokens)(logits.flatten(0, 1), 6, draws, 2)
    for r in range(3):
        for node in range(2):
            scores = logits[r, node]
            if r:
                scores = scores / draws.temperatures[r] + gumbel(draws.seeds[r, 2:3], tokens)[0]
            best = scores.argsort(descending=True)[:6]
            assert found.view(3, 2, 6)[r, node].tolist() == tokens[best].tolist()
            assert torch.allclose(logprobs.view(3, 2, 6)[r, node], scores.log_softmax(0)[best])

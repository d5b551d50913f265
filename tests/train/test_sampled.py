from __future__ import annotations

import torch

from vllm_eagle.train.batches import pack
from vllm_eagle.train.features import Example
from vllm_eagle.train.sampled import SampledVocabulary
from vllm_eagle.train.words import Ends, Words


def test_a_sample_stands_for_the_whole_vocabulary(toy_examples: list[Example], toy_words: Words) -> None:
    """Catches sampled tokens that count as one each: the loss would then ignore most of the vocabulary."""
    batch = pack(toy_examples[:2])
    torch.manual_seed(0)
    lm_head = torch.randn(256, 32) / 4
    hidden = torch.randn(32)
    sampled = SampledVocabulary(Ends(toy_words.embedding, lm_head), torch.arange(5), sample=20)
    cuts = [sampled.words(batch, seed) for seed in range(300)]
    sums = torch.stack([(cut.lm_head @ hidden + cut.log_weights).exp().sum() for cut in cuts])
    whole = (lm_head @ hidden).exp().sum()
    error = float(sums.std()) / 300**0.5
    assert error < 0.02 * whole
    assert abs(float(sums.mean() - whole)) < 3 * error


def test_a_batch_finds_all_its_candidates(toy_examples: list[Example], toy_words: Words) -> None:
    """Catches a candidate or a taken token that is missing, or that counts for others."""
    batch = pack(toy_examples[:2])
    cut = SampledVocabulary(Ends(toy_words.embedding, toy_words.lm_head), torch.arange(5), sample=20).words(batch, 1)
    needed = torch.cat((torch.arange(5), batch.top_ids.flatten(), batch.chosen))
    assert int(cut.places[needed].min()) >= 0
    assert float(cut.log_weights[cut.places[needed]].abs().max()) == 0
    assert len(cut.lm_head) == len(needed.unique()) + 20
    torch.testing.assert_close(cut.lm_head[cut.places[needed]], toy_words.lm_head[needed])


def test_the_sample_follows_from_its_seed(toy_examples: list[Example], toy_words: Words) -> None:
    """Catches a resumed fit that draws other tokens."""
    batch = pack(toy_examples[:2])
    sampled = SampledVocabulary(Ends(toy_words.embedding, toy_words.lm_head), torch.arange(5), sample=20)
    one, two, other = (sampled.words(batch, seed).places for seed in (7, 7, 8))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)

"""Every variant of a head, read from every layout, drafts what plain formulas and the paper's loop draft."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.drafting.scored import ScoredPool, paths_of
from tests.heads.plain import PlainHead
from tests.heads.variants import CASES, write
from vllm_eagle.drafting import DraftVocabulary, HeadDrafter, Known
from vllm_eagle.drafting.reference import grow
from vllm_eagle.heads import AnyHead, Eagle3Head, load_head
from vllm_eagle.train.served import AnswerCache
from vllm_eagle.tree import DraftTree, DynamicGrowth

LENGTH = 9


def inputs(head: AnyHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the target's embedding and LM head [V, E], its states [L, A*E] and the certain tokens [L+1]."""
    torch.manual_seed(5)
    config, wide = head.config, head.config.target_size
    embedding, lm_head = torch.randn(config.vocab_size, wide), 0.3 * torch.randn(config.vocab_size, wide)
    width = config.num_aux * wide if config.is_eagle3 else wide
    return embedding, lm_head, torch.randn(LENGTH, width), torch.randint(config.vocab_size, (LENGTH + 1,))


def draft(head: AnyHead, growth: DynamicGrowth) -> DraftTree:
    """Let the drafter of serving grow one tree."""
    embedding, lm_head, states, tokens = inputs(head)

    def logits(features: Tensor) -> Tensor:
        hidden, rows = head.readout(features, lm_head)
        return hidden @ rows.T

    words = DraftVocabulary(logits, head.vocabulary if isinstance(head, Eagle3Head) else None)
    known = Known(
        request_ids=["only"],
        features=states,
        next_tokens=tokens[1:],
        positions=torch.arange(LENGTH),
        lengths=torch.tensor([LENGTH], dtype=torch.int32),
        rooms=[growth.size],
        histories=[tokens.numpy().astype(np.int32)],
    )
    cache = AnswerCache(SimpleNamespace(slots=[LENGTH], start=torch.tensor([LENGTH - 1])))  # type: ignore[arg-type]
    return HeadDrafter(head, head.share_embedding(lambda ids: embedding[ids]), words, growth).draft(known, cache)[0]


@pytest.mark.parametrize("name", CASES)
def test_15_drafts_equal_the_reference_loops(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a flag, norm, bias, map or layer that is lost or misplaced, at any depth (scenarios 15, 17, 66 and 69)."""
    monkeypatch.setattr("vllm_eagle.drafting.head_drafter.CandidatePool", ScoredPool)
    folder = write(name, tmp_path)
    head, plain = load_head(folder), PlainHead(folder)
    embedding, lm_head, states, tokens = inputs(head)
    embedding = plain.embedding(embedding)
    growth = DynamicGrowth(22, 6, 2)  # every candidate is kept, on all six levels
    scores = dict(zip(paths_of(draft(head, growth)), ScoredPool.scores[0], strict=True))
    wanted = grow(growth, plain, lambda ids: embedding[ids], lambda f: plain.logits(f, lm_head), states, tokens)
    assert scores == pytest.approx(wanted, rel=1e-4, abs=5e-4)
    assert {len(path) for path in scores} == {1, 2, 3, 4, 5, 6}


def test_every_variant_drafts_something_else(tmp_path: Path) -> None:
    """Catches a comparison that would hold whatever a flag did: cases differ from the plain one (scenario 69)."""
    growth, plain = DynamicGrowth(22, 6, 2), {}
    for number, name in enumerate(CASES):
        layout, variant = name.split(", ")
        paths = paths_of(draft(load_head(write(name, tmp_path / str(number))), growth))
        if variant == "plain":
            plain[layout] = paths
        else:
            assert paths != plain[layout], name


@pytest.mark.parametrize("name", CASES)
def test_of_the_last_layer_only_what_is_wanted(name: str, tmp_path: Path) -> None:
    """Catches a prompt whose every position goes through the whole head, and rows that are not those asked for."""
    head = load_head(write(name, tmp_path))
    embedding, _, states, tokens = inputs(head)
    embedded = head.share_embedding(lambda ids: embedding[ids])(tokens[1:])
    wanted, seen = torch.tensor([2, LENGTH - 1]), list[tuple[int, int]]()

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append((len(query), len(key)))
        rows = wanted if len(query) < len(key) else torch.arange(LENGTH)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        past = torch.arange(LENGTH) <= rows[:, None]
        return functional.scaled_dot_product_attention(q, k, v, past, enable_gqa=True).transpose(0, 1)

    with torch.inference_mode():
        fused, positions = head.fuse(states), torch.arange(LENGTH)
        whole, part = head(embedded, fused, positions, attend), head(embedded, fused, positions, attend, wanted)
    assert torch.allclose(part, whole[wanted], atol=1e-5)
    layers = head.config.num_layers
    assert seen == [(LENGTH, LENGTH)] * (2 * layers - 1) + [(2, LENGTH)]

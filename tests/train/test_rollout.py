from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.train.naive import draft, logits, random_head
from vllm_eagle.train.batches import pack
from vllm_eagle.train.features import Example
from vllm_eagle.train.rollout import rollout
from vllm_eagle.train.target import head_config
from vllm_eagle.train.trainable import TrainableEagle1
from vllm_eagle.train.words import Words


@pytest.mark.parametrize("kind", ["eagle1", "eagle1, 2 layers", "eagle3"])
def test_every_depth_of_every_round_is_what_a_draft_would_give(
    kind: str,
    toy_folder: Path,
    toy_examples: list[Example],
    toy_states: list[Example],
    toy_words: Words,
    toy_draft_words: Words,
) -> None:
    """Catches a shift of tokens against features, a wrong position, and a mask that shows a round too much or too little.

    With an EAGLE-3 head also a next step that reads what comes after `norm`, or states fused a second time.
    """
    if kind == "eagle3":
        toy_examples, toy_words = toy_states, toy_draft_words
        head = random_head(head_config(toy_folder, 1, None, 60, (0, 1, 2)), words=toy_words)
    else:
        head = random_head(head_config(toy_folder, 2 if "2" in kind else 1))
    examples = toy_examples[:3]
    batch = pack(examples)
    owners = [(example, 5 + i) for example in examples for i in range(23)]  # 6 prompt tokens: round 0 starts at slot 5
    depths = list(rollout(head, batch, toy_words, 4, 10**6, None))
    assert [len(depth.rows.index) for depth in depths] == [69, 66, 63, 60]
    for s, depth in enumerate(depths):
        for row, index in enumerate(depth.rows.index.tolist()):
            example, start = owners[index]
            path = example.tokens[start + 2 : start + 2 + s].tolist()
            out = draft(head, example, toy_words, start, path)
            target = start + 1 + s  # this feature should come out, and it chose the token after it
            assert float((depth.out[row] - out).norm()) < 2e-3 * float(out.norm())
            if kind != "eagle3":
                expected = F.smooth_l1_loss(out, example.features[target].float())
                torch.testing.assert_close(depth.feature_loss[row], expected, rtol=1e-3, atol=1e-4)
            guesses = logits(head, out, toy_words)
            taken = int(toy_words.places[example.tokens[target + 1]])
            assert int(depth.scores.rank[row]) == (int((guesses > guesses[taken]).sum()) if taken >= 0 else len(guesses))


def test_a_round_ends_when_no_tree_would_hold_its_path(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches rows of the wrong rounds being kept once some are dropped."""
    head, batch = random_head(head_config(toy_folder, 1)), pack(toy_examples[:8])
    free = list(rollout(head, batch, toy_words, 3, 10**6, None))
    cut = list(rollout(head, batch, toy_words, 3, 40, None))
    alive = set(range(len(batch.start)))
    for all_rounds, some in zip(free, cut, strict=True):
        rank = dict(zip(all_rounds.rows.index.tolist(), all_rounds.scores.rank.tolist(), strict=True))
        loss = dict(zip(all_rounds.rows.index.tolist(), all_rounds.feature_loss.tolist(), strict=True))
        assert set(some.rows.index.tolist()) == alive & set(rank)
        assert [loss[i] for i in some.rows.index.tolist()] == pytest.approx(some.feature_loss.tolist(), rel=1e-4)
        alive = {i for i in alive & set(rank) if rank[i] < 40}
    assert 0 < len(cut[2].rows.index) < len(free[2].rows.index)


def test_gradients_reach_through_the_heads_own_outputs(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches an unroll whose inputs are detached, or a head that is trained at depth 0 only."""
    head = TrainableEagle1(head_config(toy_folder, 1))
    depths = list(rollout(head, pack(toy_examples[:2]), toy_words, 3, 10**6, None))
    first = depths[0].feature_loss.sum()
    last = depths[2].feature_loss.sum()
    fusion = head.get_parameter("head.fc.parametrizations.weight.original")
    (through,) = torch.autograd.grad(last, fusion, retain_graph=True)
    (alone,) = torch.autograd.grad(first, fusion)
    assert through.norm() > 0
    assert not torch.allclose(through, alone)


def test_export_folds_the_scales(toy_folder: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches an exported head that needs inputs nobody scales for it, and a start that forgets to unfold them."""
    batch = pack(toy_examples[:4])
    trained = TrainableEagle1(head_config(toy_folder, 1))
    trained.begin([batch], toy_words)
    again = TrainableEagle1(head_config(toy_folder, 1))
    again.begin([batch], toy_words)
    again.start_from(trained.exported())
    losses = [next(rollout(h, batch, toy_words, 1, 1, None)).feature_loss for h in (trained, trained.exported(), again)]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])

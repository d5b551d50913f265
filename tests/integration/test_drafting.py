"""What the head drafts inside vLLM is what the paper's loop drafts, and a chain is vLLM's own chain."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.drafting.scored import ScoredPool, paths_of
from tests.integration.harness import engine, generate, greedy, prompts, runner_of, trace, watching
from vllm_eagle import speculate
from vllm_eagle.drafting import HeadCache, HeadDrafter, Known
from vllm_eagle.drafting.reference import grow
from vllm_eagle.heads import Eagle3Head, Head, load_head
from vllm_eagle.testing import CheckedDrafter, tiny_head, tiny_target
from vllm_eagle.tree import DraftTree, DynamicGrowth

pytestmark = pytest.mark.usefixtures("full_precision")
LENGTHS = [5, 33, 64, 17]


DYNAMIC = {"tree_size": 12, "tree_depth": 6, "tree_top_k": 3}
EAGLE3 = 0
"""Stands for an EAGLE-3 head where others are told apart by their layers."""
STATIC = {"tree": str(Path(__file__).parents[2] / "configs" / "tree" / "eagle1_25.json")}


def a_head(folder: Path, layers: int, **options: Any) -> str:
    """Write a random head of so many layers."""
    if layers == EAGLE3:
        return tiny_head(folder / "head", draft_vocab=100)
    return tiny_head(folder / "head", layers=layers, **options)


def readout(head: Head, compute_logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what maps the head's features [n, D] to logits of the target's tokens [n, V], plainly."""
    if not isinstance(head, Eagle3Head):
        return compute_logits

    def logits(features: Tensor) -> Tensor:
        hidden, rows = head.readout(features, torch.empty(0))
        found = torch.full((len(features), head.config.vocab_size), -torch.inf)
        found[:, head.vocabulary] = hidden @ rows.T
        return found

    return logits


@pytest.mark.parametrize(("layers", "options"), [(1, DYNAMIC), (2, DYNAMIC), (1, STATIC), (3, DYNAMIC), (EAGLE3, DYNAMIC)])
def test_draft_logits_equal_the_reference_loop(target: str, tmp_path: Any, layers: int, options: dict[str, Any]) -> None:
    """Catches a shifted token, feature, position or ancestor in the head's attention, at any depth (scenarios 15 and 17)."""
    # the last case also has other heads than the target: vLLM then keeps K/V pages of two sizes
    folder = a_head(tmp_path, layers, bias=layers == 1, heads=(8, 8, 64) if layers == 3 else (4, 2, 32))
    llm = engine(target, max_num_batched_tokens=64, **speculate(folder, **options))
    runner, plain = runner_of(llm), load_head(folder)
    words = plain.vocabulary if isinstance(plain, Eagle3Head) else slice(None)  # the others are -inf, whose gap is NaN

    def logits(features: Tensor) -> Tensor:
        return readout(plain, runner.model.compute_logits)(features)[:, words]

    checked = CheckedDrafter(runner.drafter.drafter, plain, runner.model.embed_input_ids, logits)
    runner.drafter.drafter = checked
    with torch.inference_mode():
        generate(llm, prompts(LENGTHS), greedy(12))
    assert set(checked.checked) == set(range(checked.growth.depth))
    assert max(checked.worst.values()) < 1e-4, checked.worst


class Traced(HeadDrafter):
    """Draft as `HeadDrafter` does and keep, step by step, what the trees were grown from and what they became."""

    def __init__(self, inner: HeadDrafter) -> None:
        super().__init__(inner.head, inner.embed, inner.candidates, inner.growth)
        self.features: dict[str, list[Tensor]] = {}
        self.drafted: list[tuple[Tensor, Tensor, DraftTree, list[float]]] = []

    def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
        """See `Drafter`."""
        for request, features in zip(known.request_ids, torch.split(known.features, known.lengths.tolist()), strict=True):
            self.features.setdefault(request, []).append(features.clone())
        trees = super().draft(known, cache)
        drafting = [r for r, room in enumerate(known.rooms) if room > 0]
        for r, scores in zip(drafting, ScoredPool.scores if drafting else [], strict=True):
            tokens = torch.from_numpy(known.histories[r].copy()).long()
            self.drafted.append((torch.cat(self.features[known.request_ids[r]]), tokens, trees[r], scores))
        return trees


@pytest.mark.parametrize("layers", [1, 2, EAGLE3])
def test_drafted_trees_equal_the_reference_loops(target: str, tmp_path: Any, monkeypatch: Any, layers: int) -> None:
    """Catches a node drafted in another place than the paper's loop puts it, or with another score (scenarios 15 and 17)."""
    folder = a_head(tmp_path, layers)
    llm = engine(target, max_num_batched_tokens=96, max_num_seqs=10, **speculate(folder, tree_size=12))
    runner, plain = runner_of(llm), load_head(folder)
    monkeypatch.setattr("vllm_eagle.drafting.head_drafter.CandidatePool", ScoredPool)
    usual = runner.drafter.drafter
    depths = range(1, 5) if layers == 2 else (5,)
    exact = total = 0
    for depth in depths:
        usual.growth = growth = DynamicGrowth(12, depth, 3)
        runner.drafter.drafter = traced = Traced(usual)
        generate(llm, prompts([4 + 5 * r for r in range(10)]), greedy(22 if layers == 1 else 7))
        assert len(traced.drafted) >= (200 if layers == 1 else 60)
        for features, tokens, tree, scores in traced.drafted:
            with torch.inference_mode():
                offered = grow(
                    growth, plain, runner.model.embed_input_ids, readout(plain, runner.model.compute_logits), features, tokens
                )
            want = sorted(offered.values(), reverse=True)[: growth.size]
            found = paths_of(tree)
            # by score: two candidates that tie to four digits may trade places
            assert scores == pytest.approx(want, abs=1e-4)
            assert [offered[path] for path in found] == pytest.approx(scores, abs=1e-4)
            exact += set(found) == set(sorted(offered, key=lambda path: -offered[path])[: tree.size])
            total += 1
    assert exact >= 0.98 * total > 50


def test_a_chain_accepts_what_vllms_own_chain_eagle_accepts(tmp_path: Any) -> None:
    """Catches a difference in features, shift or positions that only shows as lost acceptance (scenario 4)."""
    target = tiny_target(tmp_path / "target", damping=0.002)
    folder = tiny_head(tmp_path / "head", bias=False, copies=True)
    mine = engine(target, **speculate(folder, tree_size=4, tree_depth=4, tree_top_k=1))
    asked = prompts(LENGTHS)
    _, got = trace(mine, asked, greedy(40))
    theirs = engine(target, speculative_config={"method": "eagle", "model": folder, "num_speculative_tokens": 4})
    _, want = trace(theirs, asked, greedy(40))
    assert got == want
    assert len({count for request in want for count in request}) > 2  # otherwise nothing was compared


def numbered(folder: str, spread: Callable[[str], float]) -> str:
    """Replace the random weights of a folder by numbers that no release of torch or transformers changes."""
    path = Path(folder) / "model.safetensors"
    weights = {}
    for name, tensor in load_file(path).items():
        if tensor.dim() == 1:
            weights[name] = torch.full_like(tensor, float("norm" in name))
            continue
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(tensor.shape))
        weights[name] = torch.from_numpy(noise).float() * spread(name)
    if "fc.weight" in weights:
        weights["fc.weight"][:, :64] += torch.eye(64)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def test_18_accepted_counts_are_pinned(tmp_path: Path) -> None:
    """Catches acceptance that shrinks from one version to the next, unseen since the text stays right (scenario 18)."""
    target = numbered(tiny_target(tmp_path / "target"), lambda name: 0.001 if "o_proj" in name or "down_proj" in name else 0.5)
    # guesses hang on what the head attends to, and where
    spreads = {"q_proj": 0.3, "k_proj": 0.3, "v_proj": 0.06, "o_proj": 0.06}
    folder = numbered(tiny_head(tmp_path / "head", copies=True), lambda name: spreads.get(name.split(".")[-2], 0.02))
    llm = engine(target, **speculate(folder, tree_size=12, tree_depth=4, tree_top_k=4))
    asked = prompts([5 + 7 * r for r in range(9)])
    _, counts = trace(llm, asked, greedy(40))
    assert counts[:3] == [trace(llm, [prompt], greedy(40))[1][0] for prompt in asked[:3]]  # alone as in company
    assert counts == json.loads((Path(__file__).parent / "accepted_counts.json").read_text())


def test_an_eagle3_head_reads_the_layers_it_names(tmp_path: Path) -> None:
    """Catches states of other layers, or in the order vLLM hands them out instead of the head's own."""
    target, layers = tiny_target(tmp_path / "target", layers=4), [3, 0, 1]
    folder = Path(tiny_head(tmp_path / "head", draft_vocab=100))
    config = json.loads((folder / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": layers}
    (folder / "config.json").write_text(json.dumps(config))
    base = engine(target)
    llm = engine(target, **speculate(str(folder), tree_size=4, tree_depth=2, tree_top_k=2))
    seen: list[Tensor] = []
    asked = prompts([40, 7, 90])
    with watching(llm, lambda known, trees: seen.append(known.features.clone())):
        assert generate(llm, asked[:1], greedy(2)) == generate(base, asked[:1], greedy(2))
    with torch.inference_mode():
        states = AutoModelForCausalLM.from_pretrained(target)(torch.tensor(asked[:1]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer][0] for layer in layers], -1)
    torch.testing.assert_close(seen[0], wanted, rtol=0.01, atol=0.01)  # layer after layer, rounding grows in a random model
    params = [SamplingParams(temperature=0.9 * (r % 2), seed=r, max_tokens=30, ignore_eos=True) for r in range(len(asked))]
    assert generate(llm, asked, params) == generate(base, asked, params)


def test_a_head_without_layers_reads_the_usual_ones(tmp_path: Path) -> None:
    """Catches a released head that names no layers read at vLLM's defaults for another size, or not at all."""
    folder = Path(tiny_head(tmp_path / "head", draft_vocab=100))
    config = json.loads((folder / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": []}
    (folder / "config.json").write_text(json.dumps(config))
    target = tiny_target(tmp_path / "target", layers=8)
    assert runner_of(engine(target, **speculate(str(folder), tree_size=4))).drafter.aux_layers == (2, 4, 5)

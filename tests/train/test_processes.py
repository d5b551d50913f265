"""A step is the same however its batches are dealt out: joined, one after another, or over processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_eagle.errors import EagleError
from vllm_eagle.train import optimizers, recipe
from vllm_eagle.train.batches import Sampler, Share, pack
from vllm_eagle.train.cli import main
from vllm_eagle.train.features import Example
from vllm_eagle.train.fit import Fit, FitConfig
from vllm_eagle.train.processes import Team
from vllm_eagle.train.sampled import SampledVocabulary
from vllm_eagle.train.target import head_config
from vllm_eagle.train.trainable import trainable
from vllm_eagle.train.words import Ends, Words

CONFIG = FitConfig(steps=100, warmup=1, batch_rounds=128, depths=3, noise=0.0, clip=1e9)


def _gradients(fit: Fit, batches: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
    """Take one step of a fresh head over some batches and return its gradients."""
    packed = [pack(batch) for batch in batches]
    head = trainable(fit.head_config)
    head.begin(packed, fit.words)
    torch.manual_seed(0)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    share = Share(list(enumerate(packed)), sum(len(batch.start) for batch in packed))
    fit._step(5, head, optimizers.build(head, 1e-3, 0.0), share)
    return {name: weight.grad for name, weight in head.named_parameters() if weight.grad is not None}


@pytest.fixture(params=["eagle1", "eagle3"])
def fit(
    request: pytest.FixtureRequest,
    toy_folder: Path,
    toy_examples: list[Example],
    toy_states: list[Example],
    toy_words: Words,
    toy_draft_words: Words,
    tmp_path: Path,
) -> Fit:
    rest = tmp_path, lambda head: None, Team.gather("cpu")
    if request.param == "eagle1":
        sampled = SampledVocabulary(Ends.load(toy_folder), torch.arange(256), 0)  # nothing is left to chance
        return Fit(CONFIG, head_config(toy_folder, 1), toy_words, sampled.words, toy_examples, *rest)
    config = replace(CONFIG, feature_weight=0.0)
    head = head_config(toy_folder, 1, None, 60, (0, 1, 2))
    return Fit(config, head, toy_draft_words, lambda batch, seed: toy_draft_words, toy_states, *rest)


def test_accumulated_gradients_are_those_of_the_joined_batch(fit: Fit) -> None:
    """Catches a mean of means: batches of unlike length must count by their rounds."""
    joined = _gradients(fit, [fit.examples[:9]])
    dealt = _gradients(fit, [fit.examples[:2], fit.examples[2:9]])
    assert joined.keys() == dealt.keys() and len(joined) > 8
    for name in joined:
        torch.testing.assert_close(dealt[name], joined[name], rtol=1e-4, atol=1e-6)


def test_bfloat16_is_near_and_not_the_same(fit: Fit) -> None:
    """Catches a precision that has no effect, and a softmax or a whitened basis that it ruins."""
    exact = _gradients(fit, [fit.examples[:9]])
    fit.config = replace(fit.config, precision="bfloat16")
    rounded = _gradients(fit, [fit.examples[:9]])
    near = 0.07 if fit.head_config.is_eagle3 else 0.05
    for name in exact:
        assert 0 < (rounded[name] - exact[name]).norm() < near * exact[name].norm(), name


def test_the_union_of_all_shares_is_what_one_process_sees(toy_examples: list[Example]) -> None:
    """Catches a batch that two processes train on or that none does, and noise that is the same in both."""
    sampler = Sampler(toy_examples, 100, seed=3)
    alone = sampler.shares(4, 4, 0, 1)
    team = [sampler.shares(4, 2, process, 2) for process in (0, 1)]
    for _ in range(30):
        whole, parts = next(alone), [next(shares) for shares in team]
        mine = {number: batch.tokens.tolist() for number, batch in whole.batches}
        theirs = {number: batch.tokens.tolist() for part in parts for number, batch in part.batches}
        assert mine == theirs and len(mine) == 4
        assert {part.rounds for part in parts} == {whole.rounds} == {sum(len(batch.start) for _, batch in whole.batches)}


SETTINGS = ["steps=12", "warmup=2", "batch_rounds=128", "depths=2", "save_every=4", "judge_every=6", "held_out_percent=10"]


def _words(toy_folder: Path, features: Path, out: Path, *settings: str) -> list[str]:
    paths = ["--model", str(toy_folder), "--features", str(features), "--out", str(out)]
    return ["fit", *paths, "--set", *SETTINGS, *settings]


def _fit_as_two(words: list[str]) -> None:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vllm_eagle.cli"]
    done = subprocess.run([sys.executable, "-m", *launch, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def _states(*folders: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / "state.pt") for folder in folders]


def test_two_processes_train_as_one(toy_folder: Path, toy_features: Path, tmp_path: Path) -> None:
    """Catches gradients that are averaged or not exchanged, and two processes that write the same files."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(_words(toy_folder, toy_features, one, "accumulate=2")) == 0
    _fit_as_two(_words(toy_folder, toy_features, two))
    alone, team = _states(one, two)
    assert alone["step"] == team["step"] == 12
    assert alone["identity"] == team["identity"]  # so that either continues the other
    for name in alone["head"]:
        torch.testing.assert_close(team["head"][name], alone["head"][name], rtol=1e-5, atol=1e-5)
    journals = [(folder / "journal.jsonl").read_text().count("\n") for folder in (one, two)]
    assert journals[0] == journals[1]


def test_two_processes_continue_what_one_began(
    toy_folder: Path, toy_features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an order of data or optimizer state that a resumed team does not share; of EAGLE-3 also a map of its words."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    settings, broken, straight = ("recipe=eagle3", "draft_vocabulary=60"), tmp_path / "broken", tmp_path / "straight"
    monkeypatch.setattr(recipe, "save_head", killed)  # right behind the first saved state
    with pytest.raises(KeyboardInterrupt):
        main(_words(toy_folder, toy_features, broken, *settings, "accumulate=2"))
    assert _states(broken)[0]["step"] == 4
    monkeypatch.undo()
    assert main(_words(toy_folder, toy_features, straight, *settings, "accumulate=2")) == 0
    _fit_as_two(_words(toy_folder, toy_features, broken, *settings))
    whole, resumed = _states(straight, broken)
    for name in whole["head"]:
        torch.testing.assert_close(resumed["head"][name], whole["head"][name], rtol=1e-5, atol=1e-5)


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where a package is missing."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(EagleError, match=r"pip install 'vllm_eagle\[train\]'"):
        Team.gather("cpu")

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_eagle.heads import Eagle3Head, load_head, new_head
from vllm_eagle.train import cli, optimizers
from vllm_eagle.train.batches import split
from vllm_eagle.train.cli import main
from vllm_eagle.train.evaluate import chain_acceptance
from vllm_eagle.train.features import Example
from vllm_eagle.train.target import head_config
from vllm_eagle.train.trainable import trainable
from vllm_eagle.train.vocabulary import read_vocabulary
from vllm_eagle.train.words import Ends, Words

COMMON = ["warmup=10", "batch_rounds=256", "save_every=20", "held_out_percent=10"]
SETTINGS = {
    "eagle1": [*COMMON, "steps=120", "judge_every=60", "depths=3", "token_weight=1.0", "learning_rate=0.003"],
    "eagle3": [*COMMON, "steps=60", "judge_every=60", "recipe=eagle3", "depths=2", "learning_rate=0.01"],
}


def _command(toy_folder: Path, features: Path, out: Path, *settings: str, recipe: str = "eagle1") -> list[str]:
    paths = ["--model", str(toy_folder), "--features", str(features), "--out", str(out)]
    return ["fit", *paths, "--set", *SETTINGS[recipe], *settings]


FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload([__name__, "vllm_eagle.train.recipe"])  # imported once for all fits


def _fit(command: list[str]) -> None:
    torch.set_num_threads(1)
    sys.exit(main(command))


def _start(command: list[str]) -> BaseProcess:
    """Fit in a process of its own: an engine in this one fixes the number of threads, and sums depend on it."""
    process = FRESH.Process(target=_fit, args=(command,))
    process.start()
    return process


def _exitcode(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def fitted(toy_folder: Path, toy_features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fit a head without interruption."""
    out = tmp_path_factory.mktemp("fit")
    assert _exitcode(_start(_command(toy_folder, toy_features, out))) == 0
    return out


@pytest.fixture(scope="module")
def fitted3(toy_folder: Path, toy_features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fit an EAGLE-3 head without interruption."""
    out = tmp_path_factory.mktemp("fit3")
    assert _exitcode(_start(_command(toy_folder, toy_features, out, recipe="eagle3"))) == 0
    return out


def test_a_fitted_head_is_useful(fitted: Path, toy_examples: list[Example], toy_words: Words) -> None:
    """Catches training that does not train, and an export that is not the head that was trained."""
    _, held = split(toy_examples, 10)
    found = chain_acceptance(load_head(fitted / "head"), held, toy_words)
    written = torch.cat([example.tokens[6:] for example in held])
    commonest = written.bincount().max() / len(written)
    assert found.rates[0] > max(0.5, 2 * commonest)
    assert found.mean_length > 1.8
    journal = [json.loads(line) for line in (fitted / "journal.jsonl").read_text().splitlines()]
    last = next(row["held_out"] for row in reversed(journal) if "held_out" in row)
    assert last["alpha"][0] == pytest.approx(found.rates[0], abs=0.02)  # exported in bfloat16
    assert len(read_vocabulary(fitted / "head" / "draft_vocab.json", 256)) > 20


def test_a_fitted_eagle3_head_is_useful(
    fitted3: Path, toy_features: Path, toy_folder: Path, toy_states: list[Example], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches training that does not train, an LM head or map that does not reach the export, and a head nobody can judge."""
    head = load_head(fitted3 / "head")
    assert isinstance(head, Eagle3Head)
    assert head.config.aux_layers == (0, 1, 2)
    assert {path.name for path in (fitted3 / "head").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert "EAGLE-3 draft head" in (fitted3 / "head" / "README.md").read_text()
    _, held = split(toy_states, 10)
    found = chain_acceptance(head, held, Ends.load(toy_folder).words(head.vocabulary))
    journal = [json.loads(line) for line in (fitted3 / "journal.jsonl").read_text().splitlines()]
    judged = [row["held_out"] for row in journal if "held_out" in row]
    assert judged[-1]["alpha"][0] == pytest.approx(found.rates[0], abs=0.02)  # exported in bfloat16
    assert found.rates[0] > 10 * judged[0]["alpha"][0]
    assert found.mean_length > 1.8 > 1.1 > judged[0]["chain_length"]
    paths = ["--model", str(toy_folder), "--head", str(fitted3 / "head"), "--features", str(toy_features)]
    assert main(["evaluate", *paths, "--limit", "10"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tree_length"] > 1.5


@pytest.mark.parametrize("recipe", ["eagle1", "eagle3"])
def test_a_killed_fit_resumes_to_the_same_weights(
    recipe: str, request: pytest.FixtureRequest, toy_folder: Path, toy_features: Path, tmp_path: Path
) -> None:
    """Catches state that is not saved (optimizer, order of data, noise) and a file torn by the kill."""
    fitted: Path = request.getfixturevalue("fitted" if recipe == "eagle1" else "fitted3")
    steps = torch.load(fitted / "state.pt")["step"]
    command = _command(toy_folder, toy_features, tmp_path, recipe=recipe)
    process = _start(command)
    while not (tmp_path / "state.pt").exists() and process.is_alive():
        time.sleep(0.01)
    process.kill()
    assert _exitcode(process) == -signal.SIGKILL, "it was to be killed half way"
    assert torch.load(tmp_path / "state.pt")["step"] < steps
    assert _exitcode(_start(command)) == 0
    assert torch.load(tmp_path / "state.pt")["step"] == steps
    straight, resumed = (torch.load(folder / "state.pt")["head"] for folder in (fitted, tmp_path))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_other_settings_do_not_continue_a_fit(
    fitted: Path, toy_folder: Path, toy_features: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a fit that silently mixes two recipes; and bad input that ends in a traceback."""
    assert main(_command(toy_folder, toy_features, fitted, "noise=0.3")) == 2
    assert "is of another fit" in capsys.readouterr().err


def test_an_exported_head_can_be_trained_further(fitted: Path, toy_folder: Path, toy_features: Path, tmp_path: Path) -> None:
    """Catches a start that is ignored or scaled twice."""
    command = _command(toy_folder, toy_features, tmp_path, "steps=11", "learning_rate=0.0", "judge_every=1")
    assert main([*command, "--start", str(fitted / "head")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in (fitted / "journal.jsonl").read_text().splitlines()][-1]
    assert rows[-1]["held_out"]["alpha"][0] == pytest.approx(before["held_out"]["alpha"][0], abs=0.02)


def test_layers_can_be_added_to_a_head(fitted: Path, toy_folder: Path, toy_features: Path, tmp_path: Path) -> None:
    """Catches an added layer that speaks before it has learnt anything, and one that cannot learn."""
    settings = ("layers=2", "steps=11", "learning_rate=0.0", "judge_every=1")
    assert main([*_command(toy_folder, toy_features, tmp_path, *settings), "--start", str(fitted / "head")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in (fitted / "journal.jsonl").read_text().splitlines()][-1]
    assert rows[-1]["held_out"]["alpha"][0] == pytest.approx(before["held_out"]["alpha"][0], abs=0.02)
    grown = load_head(tmp_path / "head")
    assert grown.config.num_layers == 2
    again = [*_command(toy_folder, toy_features, tmp_path / "more", "layers=2", "steps=11"), "--start", str(tmp_path / "head")]
    assert main(again) == 0
    learnt = dict(load_head(tmp_path / "more" / "head").named_parameters())
    assert learnt["layers.1.self_attn.o_proj.weight"].any()
    assert learnt["layers.1.mlp.down_proj.weight"].any()


def test_layers_are_not_taken_from_a_head(
    fitted: Path, toy_folder: Path, toy_features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a head of two layers that goes on as its first one alone."""
    settings = ("layers=2", "steps=11", "learning_rate=0.0")
    assert main([*_command(toy_folder, toy_features, tmp_path, *settings), "--start", str(fitted / "head")]) == 0
    assert main([*_command(toy_folder, toy_features, tmp_path / "less"), "--start", str(tmp_path / "head")]) == 2
    assert "--start is a head with num_layers 2, this fit trains one with 1" in capsys.readouterr().err


def test_an_eagle3_head_keeps_its_vocabulary_when_trained_further(
    fitted3: Path, toy_folder: Path, toy_features: Path, tmp_path: Path
) -> None:
    """Catches rows of the LM head that come to stand for other tokens because other data has other frequencies."""
    settings = ("steps=11", "learning_rate=0.0", "judge_every=1", "draft_vocabulary=20")
    command = _command(toy_folder, toy_features, tmp_path, *settings, recipe="eagle3")
    assert main([*command, "--start", str(fitted3 / "head")]) == 0
    first, again = load_head(fitted3 / "head"), load_head(tmp_path / "head")
    assert isinstance(first, Eagle3Head)
    assert isinstance(again, Eagle3Head)
    assert torch.equal(first.vocabulary, again.vocabulary)
    torch.testing.assert_close(first.lm_head.weight, again.lm_head.weight)


def test_a_head_of_the_other_kind_is_not_continued(
    fitted3: Path, toy_folder: Path, toy_features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches weights of one kind read as the other's."""
    assert main([*_command(toy_folder, toy_features, tmp_path), "--start", str(fitted3 / "head")]) == 2
    assert "--start is a head with kind EAGLE-3, this fit trains one with EAGLE-1" in capsys.readouterr().err


def test_features_without_states_are_refused(
    toy_folder: Path, toy_answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an EAGLE-3 head trained on features it cannot read."""
    paths = ["--model", str(toy_folder), "--answers", str(toy_answers), "--out", str(tmp_path / "features")]
    assert main(["capture", *paths]) == 0
    assert main(_command(toy_folder, tmp_path / "features", tmp_path / "out", recipe="eagle3")) == 2
    assert "capture into another folder with --aux-layers auto" in capsys.readouterr().err


def test_train_captures_what_its_recipe_reads(
    toy_folder: Path, toy_answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a whole run that ends, hours after its start, in features its recipe cannot read."""
    monkeypatch.setattr(cli, "_generate", lambda args: shutil.copytree(toy_answers, args.out))
    paths = ["--model", str(toy_folder), "--out", str(tmp_path)]
    settings = [*SETTINGS["eagle3"], "steps=11", "held_out_percent=0"]
    assert main(["train", *paths, "--self-prompt", "1", "--set", *settings]) == 0
    assert load_head(tmp_path / "fit" / "head").config.aux_layers == (0, 1, 2)
    assert main(["train", *paths, "--self-prompt", "1", "--set", *settings, "noise=0.1"]) == 2


def test_the_rate_warms_up_and_falls() -> None:
    """Catches a schedule that starts at full rate or ends at zero before the last step."""
    rates = [optimizers.cosine(step, 100, 10) for step in range(100)]
    assert (rates[0], rates[9], rates[10]) == (0.1, 1.0, 1.0)
    assert 0.019 < rates[-1] < 0.03
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("own", [(), (60, (0, 1, 2))])
def test_every_weight_learns(own: Any, toy_folder: Path) -> None:
    """Catches parameters that the optimizer does not own, as a parametrised weight easily is."""
    head = trainable(head_config(toy_folder, 1 if own else 2, None, *own))
    owned = [weight for group in optimizers.build(head, 0.1, 0.0).param_groups for weight in group["params"]]
    assert {id(weight) for weight in owned} == {id(weight) for weight in head.parameters()}
    plain = new_head(head.head.config)
    assert sum(weight.numel() for weight in owned) == sum(weight.numel() for weight in plain.parameters())


def test_features_of_another_target_are_refused(
    toy_folder: Path, toy_features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a head trained between two models that do not belong together."""
    config = LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert main(_command(tmp_path, toy_features, tmp_path / "out")) == 2
    assert "the features are 32 wide" in capsys.readouterr().err

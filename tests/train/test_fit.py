from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_eagle.heads import EagleHead, load_head
from vllm_eagle.train import optimizers
from vllm_eagle.train.batches import split
from vllm_eagle.train.cli import main
from vllm_eagle.train.evaluate import chain_acceptance
from vllm_eagle.train.features import Example
from vllm_eagle.train.target import head_config
from vllm_eagle.train.trainable import TrainableHead
from vllm_eagle.train.vocabulary import read_vocabulary
from vllm_eagle.train.words import Words

SETTINGS = [
    "steps=240", "warmup=10", "batch_rounds=256", "depths=3", "save_every=20", "judge_every=120",
    "held_out_percent=10", "token_weight=1.0", "learning_rate=0.003",
]  # fmt: skip


def _command(toy_folder: Path, features: Path, out: Path, *settings: str) -> list[str]:
    paths = ["--model", str(toy_folder), "--features", str(features), "--out", str(out)]
    return ["fit", *paths, "--set", *SETTINGS, *settings]


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Fit in a process of its own: an engine in this one fixes the number of threads, and sums depend on it."""
    code = "import sys, torch; torch.set_num_threads(1); from vllm_eagle.train.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def fitted(toy_folder: Path, toy_features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fit a head without interruption."""
    out = tmp_path_factory.mktemp("fit")
    assert _start(_command(toy_folder, toy_features, out)).wait() == 0
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


def test_a_killed_fit_resumes_to_the_same_weights(fitted: Path, toy_folder: Path, toy_features: Path, tmp_path: Path) -> None:
    """Catches state that is not saved (optimizer, order of data, noise) and a file torn by the kill."""
    command = _command(toy_folder, toy_features, tmp_path)
    process = _start(command)
    while not (tmp_path / "state.pt").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was to be killed half way"
    assert torch.load(tmp_path / "state.pt")["step"] < 240
    assert _start(command).wait() == 0
    for folder in (fitted, tmp_path):
        assert torch.load(folder / "state.pt")["step"] == 240
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


def test_the_rate_warms_up_and_falls() -> None:
    """Catches a schedule that starts at full rate or ends at zero before the last step."""
    rates = [optimizers.cosine(step, 100, 10) for step in range(100)]
    assert (rates[0], rates[9], rates[10]) == (0.1, 1.0, 1.0)
    assert 0.019 < rates[-1] < 0.03
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_every_weight_learns(toy_folder: Path) -> None:
    """Catches parameters that the optimizer does not own, as a parametrised weight easily is."""
    head = TrainableHead(head_config(toy_folder, 2))
    owned = [weight for group in optimizers.build(head, 0.1, 0.0).param_groups for weight in group["params"]]
    assert {id(weight) for weight in owned} == {id(weight) for weight in head.parameters()}
    plain = EagleHead(head.head.config)
    assert sum(weight.numel() for weight in owned) == sum(weight.numel() for weight in plain.parameters())


def test_features_of_another_target_are_refused(
    toy_folder: Path, toy_features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a head trained between two models that do not belong together."""
    config = LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert main(_command(tmp_path, toy_features, tmp_path / "out")) == 2
    assert "the features are 32 wide" in capsys.readouterr().err

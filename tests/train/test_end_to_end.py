"""A head from prompts to serving: `vllm-eagle train` as a user runs it, then vLLM's own counters against `evaluate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from vllm_eagle import speculate
from vllm_eagle.testing import tiny_target
from vllm_eagle.train.answers import Answer, AnswerWriter
from vllm_eagle.train.cli import main

TEMPLATE = (
    "{% for m in messages %}w2 {{ m['content'] }} w3 {% endfor %}{% if add_generation_prompt %}w4 {% endif %}"  # opens a turn
)
SETTINGS = [
    "steps=80", "warmup=10", "batch_rounds=512", "depths=3", "held_out_percent=10", "judge_every=40",
    "token_weight=1.0", "learning_rate=0.003",
]  # fmt: skip
TREE = {"tree_size": 12, "tree_depth": 4, "tree_top_k": 4}


def prompts(count: int, seed: int) -> list[list[int]]:
    return torch.randint(5, 256, (count, 5), generator=torch.Generator().manual_seed(seed)).tolist()


def train(*words: object, settings: Sequence[str] = SETTINGS) -> subprocess.CompletedProcess[str]:
    """Run `vllm-eagle train` in a process of its own, with vLLM's default of several."""
    command = [sys.executable, "-m", "vllm_eagle.cli", "train", *map(str, words), "--batch", "32", "--dtype", "float32"]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "--set", *settings], capture_output=True, text=True, timeout=300, env=quiet)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next word follows mostly, not only, from the last one, and whose template opens a user's turn."""
    folder = Path(tiny_target(tmp_path_factory.mktemp("chatty"), damping=0.003))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head trained by the one command."""
    out = tmp_path_factory.mktemp("trained")
    rows = [{"prompt": " ".join(f"w{i}" for i in prompt)} for prompt in prompts(160, 0)]
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = train("--model", chatty, "--prompts", out / "prompts.jsonl", "--out", out, "--max-tokens", 48)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\n0 answer tokens captured" in done.stdout, "the engine, in a process of its own, has left answers to capture"
    return out / "fit" / "head"


@pytest.fixture(scope="module")
def llm(chatty: Path, head: Path) -> Any:
    from tests.integration.harness import engine

    return engine(str(chatty), **speculate(str(head), **TREE))


def serve_and_evaluate(llm: Any, chatty: Path, head: Path, scratch: Path, capsys: Any, aux_layers: str) -> float:
    """Compare what serving counts with what `evaluate` says of the same answers; return the mean accepted length."""
    from tests.integration.harness import counters, generate, greedy, since

    asked = prompts(24, 1)
    before = counters(llm)
    outs = generate(llm, asked, greedy(96))
    counted = since(before, counters(llm))
    writer = AnswerWriter(scratch / "answers")
    for number, (prompt, out) in enumerate(zip(asked, outs, strict=True)):
        writer.write(Answer(str(number), tuple(prompt), tuple(out), 0.0))
    writer.close()
    where = ["--model", str(chatty), "--answers", str(scratch / "answers"), "--out", str(scratch / "features")]
    assert main(["capture", *where, "--aux-layers", aux_layers]) == 0
    tree = [word for name, value in TREE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["evaluate", "--model", str(chatty), "--head", str(head), "--features", str(scratch / "features"), *tree]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    served = 1 + counted["accepted_tokens"] / counted["drafts"]
    assert found["tree_length"] == pytest.approx(served, rel=0.02)
    assert found["drafts"] == pytest.approx(counted["drafts"], rel=0.005)  # the last steps' overhang is not in it
    return float(served)


def test_served_acceptance_is_what_evaluate_says(
    llm: Any, chatty: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a head that serving reads otherwise than training wrote it, and an evaluation of another tree or walk."""
    served = serve_and_evaluate(llm, chatty, head, tmp_path, capsys, "off")
    assert served > 1.8, "a head that is not useful proves nothing"


def test_an_eagle3_head_is_served_as_it_was_trained(
    chatty: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches states, norm, LM head or words of an EAGLE-3 head read otherwise by serving than by training."""
    from tests.integration.harness import engine

    (tmp_path / "judge").mkdir()
    answers, states = head.parents[1] / "answers", tmp_path / "states"
    common = ["--model", str(chatty), "--out"]
    assert main(["capture", *common, str(states), "--answers", str(answers), "--aux-layers", "0,1,1"]) == 0
    settings = [word for word in SETTINGS if not word.startswith("token_weight")]
    settings += ["recipe=eagle3", "draft_vocabulary=200"]
    assert main(["fit", *common, str(tmp_path / "fit"), "--features", str(states), "--set", *settings]) == 0
    trained = tmp_path / "fit" / "head"
    llm = engine(str(chatty), **speculate(str(trained), **TREE))
    served = serve_and_evaluate(llm, chatty, trained, tmp_path / "judge", capsys, "0,1,1")
    assert served > 1.5, "a head that is not useful proves nothing"


def test_the_target_asks_itself_and_the_command_resumes(
    chatty: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches questions that never become answers, and a second run that starts over or starts an engine for nothing."""
    command = ["--model", chatty, "--self-prompt", 40, "--out", tmp_path, "--max-tokens", 16, "--max-prompt-tokens", 140]
    settings = ["steps=12", "warmup=2", "batch_rounds=256", "depths=2"]
    first = train(*command, settings=settings)
    assert first.returncode == 0, first.stderr[-3000:]
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".jsonl", ".pt", ".safetensors")}
    assert {path.name for path in kept} >= {"answers-00000.jsonl", "features-00000.safetensors", "model.safetensors"}
    capfd.readouterr()
    assert main(["train", *map(str, command), "--set", *settings]) == 0
    second = capfd.readouterr()
    assert "0 new answer tokens" in second.out
    assert "checkpoint shards" not in second.err
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_train_that_cannot_start_says_why(chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or an engine started, before the mistake is found."""
    assert main(["train", "--model", str(chatty), "--out", str(tmp_path), "--set", *SETTINGS]) == 2
    assert "give either --prompts FILE or --self-prompt COUNT" in capsys.readouterr().err

"""States kept while the engine answers are those a second pass of the target finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.harness import engine, prompts
from vllm_eagle.integration.capturing import States
from vllm_eagle.integration.generate import stream_answers
from vllm_eagle.names import CAPTURE_WORKER
from vllm_eagle.train.answers import Answer, AnswerWriter, Question
from vllm_eagle.train.capture import CaptureConfig, capture
from vllm_eagle.train.cli import main
from vllm_eagle.train.features import Example, read_examples
from vllm_eagle.train.shards import Captured, ShardWriter
from vllm_eagle.train.target import Target

LENGTHS = (3, 150, 64, 31, 65, 7, 100, 1, 129, 40, 90, 12)


@pytest.fixture(scope="module")
def llm(target: str) -> Any:
    """Read prompts in chunks of 64 tokens, six requests at a time, with too little cache for six long ones."""
    hard = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "num_gpu_blocks_override": 17}
    return engine(target, worker_cls=CAPTURE_WORKER, **hard)


@pytest.fixture(scope="module")
def answered(llm: Any) -> list[tuple[Answer, Captured]]:
    """Answer twelve prompts, every other one greedily."""
    questions = [Question(f"q{i}", tuple(prompt), 0.8 * (i % 2), 50 + i % 3) for i, prompt in enumerate(prompts(LENGTHS))]
    return [(answer, captured) for answer, captured in stream_answers(llm, questions, 6, capture=True) if captured is not None]


def preemptions(llm: Any) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def same_but_for_ties(ours: Example, theirs: Example) -> bool:
    """Compare candidates: where the ids differ their probabilities are equal to rounding."""
    differ = ours.top_ids != theirs.top_ids
    near = (ours.top_probs.float() - theirs.top_probs.float()).abs() <= 1e-3
    return bool((near | ~differ).all()) and differ.float().mean().item() < 0.01


def test_states_are_those_of_a_second_pass(
    llm: Any, answered: list[tuple[Answer, Captured]], target: str, tmp_path: Path
) -> None:
    """Catches rows of another request, candidates off by one, chunks left out, and holes after a preemption."""
    assert preemptions(llm) > 0, "a cache that always had room proves less"
    writer, features = AnswerWriter(tmp_path / "answers"), ShardWriter(tmp_path / "ours")
    for answer, captured in answered:
        writer.write(answer)
        features.add(answer, captured)
    writer.close()
    features.close()
    model = Target.load(Path(target))
    config = CaptureConfig((tmp_path / "answers",), tmp_path / "theirs")
    assert capture(config, model).tokens == features.report.tokens > 500
    for ours, theirs in zip(read_examples(tmp_path / "ours"), read_examples(tmp_path / "theirs"), strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        torch.testing.assert_close(ours.features.float(), theirs.features.float(), rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(ours.top_probs.float(), theirs.top_probs.float(), rtol=5e-3, atol=1e-3)
        assert same_but_for_ties(ours, theirs)
    assert features.report.checked > 90
    assert capture(CaptureConfig((tmp_path / "answers",), tmp_path / "ours"), model).tokens == 0  # both agree on what is done


def test_greedy_answers_are_the_best_candidates(answered: list[tuple[Answer, Captured]]) -> None:
    """Catches logits read after the sampler has changed them, and candidates in another order."""
    for answer, captured in answered:
        if not answer.temperature:
            assert tuple(captured.example.top_ids[:, 0].tolist()) == answer.out_ids
        elif len(answer.out_ids) > 20:
            assert tuple(captured.example.top_ids[:, 0].tolist()) != answer.out_ids


def test_states_do_not_pile_up(llm: Any, answered: list[tuple[Answer, Captured]]) -> None:
    """Catches a run that needs more memory with every answer, and unmarked requests that are kept for nobody."""
    states = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner._states
    assert states == {}
    list(stream_answers(llm, [Question("plain", (3, 4), 0.0, 4)], 6))
    assert states == {}


def test_a_hole_is_not_handed_out() -> None:
    """Catches zeros that pass for features where a prefix hit left a position uncomputed."""
    rows, ids, probs = torch.ones(4, 8), torch.arange(16), torch.ones(16)
    states = States.empty(6, 3, 8, 16)
    states.put(0, rows[:2], ids, probs)
    states.put(3, rows[:3], ids, probs)
    states.put(6, rows[:1], ids, probs)
    with pytest.raises(AssertionError, match="never computed"):
        states.of(2)
    states.put(2, rows, ids, probs)
    assert states.of(2)["features"].shape == (7, 8)


def test_a_dtype_that_capture_does_not_know_is_refused(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches features in bfloat16 beside features in float32, and an engine started for them."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "w5 w6"}\n')
    words = ["--model", target, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path), "--capture", str(tmp_path)]
    assert main(["generate", *words, "--dtype", "bfloat16"]) == 2
    assert "--capture works on a CPU with --dtype float32" in capsys.readouterr().err

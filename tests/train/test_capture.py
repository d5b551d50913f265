from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Answer, AnswerWriter, read_answers
from vllm_eagle.train.capture import CaptureConfig, capture, read_aux_layers
from vllm_eagle.train.features import captured_layers, read_examples, shard_paths
from vllm_eagle.train.target import Target


def test_features_are_what_the_lm_head_reads(toy_target: Target, toy_answers: Path, toy_features: Path) -> None:
    """Catches features from before the final norm, padding that leaks in, and candidates off by one token."""
    for answer, example in zip(read_answers(toy_answers), read_examples(toy_features), strict=True):
        assert tuple(example.tokens.tolist()) == answer.token_ids
        alone = toy_target.model.model(torch.tensor([answer.token_ids])).last_hidden_state[0]
        torch.testing.assert_close(example.features.float(), alone[:-1], rtol=2e-3, atol=2e-3)
        assert tuple(example.top_ids[:, 0].tolist()) == answer.out_ids  # greedy: its best token is the one it wrote
        probs = toy_target.logits(alone[5:-1]).softmax(-1).topk(16).values
        torch.testing.assert_close(example.top_probs.float(), probs, rtol=2e-3, atol=1e-3)


def test_only_new_answers_are_captured(toy_target: Target, toy_answers: Path, tmp_path: Path) -> None:
    """Catches work done twice, and answers added later that are never seen."""
    answers = tmp_path / "answers"
    shutil.copytree(toy_answers, answers)
    config = CaptureConfig((answers,), tmp_path / "f", rows_per_shard=60)
    assert capture(config, toy_target).tokens == 96 * 24
    writer = AnswerWriter(answers)
    writer.write(Answer("new", (1, 2), (3, 4, 5), 0.0))
    writer.close()
    assert capture(config, toy_target).tokens == 3
    assert len(read_examples(tmp_path / "f")) == 97


def test_a_damaged_shard_is_captured_again(toy_target: Target, toy_answers: Path, tmp_path: Path) -> None:
    """Catches a shard cut in half that ends the run or hides its answers for good."""
    config = CaptureConfig((toy_answers,), tmp_path, rows_per_shard=60)
    capture(config, toy_target)
    first = shard_paths(tmp_path)[0]
    os.truncate(first, first.stat().st_size // 2)
    assert capture(config, toy_target).tokens == 60 * 24
    assert len(read_examples(tmp_path)) == 96


def test_a_full_disk_keeps_what_is_captured(
    toy_target: Target, toy_answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches half a shard that passes for a whole one, a traceback, or shards lost with the last."""
    config = CaptureConfig((toy_answers,), tmp_path, rows_per_shard=60)
    rename = os.replace

    def full(half: Path, path: Path) -> None:
        if path.name.startswith("features-00001"):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(half, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(EagleError, match=r"No space left on device.*free some space and run again"):
            capture(config, toy_target)
    assert [path.name for path in tmp_path.iterdir()] == ["features-00000.safetensors"]
    assert capture(config, toy_target).tokens == 36 * 24  # only what is missing


def test_unusable_answers_are_counted(toy_target: Target, tmp_path: Path) -> None:
    """Catches a vocabulary that does not match, and sequences longer than the limit."""
    writer = AnswerWriter(tmp_path / "a")
    for out in ((1, 2), (1, 300), tuple(range(200))):
        writer.write(Answer(str(out), (7,), out, 0.0))
    writer.close()
    report = capture(CaptureConfig((tmp_path / "a",), tmp_path / "f", max_length=100), toy_target)
    assert (report.tokens, report.foreign, report.too_long) == (2, 1, 1)


def test_auxiliary_states_are_what_layers_read(toy_target: Target, toy_answers: Path, tmp_path: Path) -> None:
    """Catches outputs kept for inputs, layers in another order, padding that leaks in, and rows of other answers."""
    layers, seen = (2, 0, 1), dict[int, torch.Tensor]()
    capture(CaptureConfig((toy_answers,), tmp_path, batch_tokens=300, aux_layers=layers), toy_target)
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: args[0][0]}))
        for number, layer in enumerate(toy_target.model.model.layers)
    ]
    for answer, example in zip(read_answers(toy_answers), read_examples(tmp_path, layers), strict=True):
        toy_target.features([answer.token_ids])
        expected = torch.cat([seen[number] for number in layers], dim=-1)[:-1]
        torch.testing.assert_close(example.features.float(), expected, rtol=2e-3, atol=2e-3)
    for hook in hooks:
        hook.remove()


def test_auxiliary_states_of_other_layers_are_refused(toy_target: Target, toy_answers: Path, tmp_path: Path) -> None:
    """Catches a head that is fed the wrong layers, and a folder in which some answers have states and some have not."""
    config = CaptureConfig((toy_answers,), tmp_path, aux_layers=(0, 1, 2))
    capture(config, toy_target)
    assert captured_layers(tmp_path) == (0, 1, 2)
    assert captured_layers(tmp_path / "nowhere") is None
    with pytest.raises(EagleError, match="holds states of layers 0,1,2, the head reads 0,0,2; capture into another folder"):
        read_examples(tmp_path, (0, 0, 2))
    with pytest.raises(EagleError, match=r"this capture adds \(none\); use the same --aux-layers or another folder"):
        capture(replace(config, aux_layers=()), toy_target)


def test_a_state_too_large_for_float16_is_refused(toy_folder: Path, toy_answers: Path, tmp_path: Path) -> None:
    """Catches infinities on disk: inner states have no norm, and some models' are huge."""
    target = Target.load(toy_folder)
    target.model.model.layers[1].mlp.down_proj.weight.mul_(1e7)
    with pytest.raises(EagleError, match="a state of layers 0,1,2 exceeds float16"):
        capture(CaptureConfig((toy_answers,), tmp_path, aux_layers=(0, 1, 2)), target)


def test_layers_are_named_on_the_command_line() -> None:
    """Catches ids read as something else, and ids of layers that the target has not."""
    assert [read_aux_layers(word, 30) for word in ("auto", "off", "4,9,29")] == [(2, 15, 27), (), (4, 9, 29)]
    for word in ("4,9,30", "-1,2,3", "1,2", "some"):
        with pytest.raises(EagleError, match=r"give auto, off, or 3 numbers within 0 … 29"):
            read_aux_layers(word, 30)


def test_features_of_another_layer_are_refused(toy_folder: Path, toy_answers: Path, tmp_path: Path) -> None:
    """Catches a target whose hidden states are not what its LM head reads: the argmax check must stop the run."""

    class Shifted(Target):
        def states(self, sequences, aux_layers):  # type: ignore[no-untyped-def]
            return [(f + 1e5 * torch.randn_like(f).sign(), aux) for f, aux in super().states(sequences, aux_layers)]

    target = Shifted(Target.load(toy_folder).model, None)
    with pytest.raises(EagleError, match="not what the LM head reads"):
        capture(CaptureConfig((toy_answers,), tmp_path), target)

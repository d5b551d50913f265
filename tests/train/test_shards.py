from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Answer
from vllm_eagle.train.features import Example, read_examples, shard_paths
from vllm_eagle.train.shards import Captured, CaptureReport, ShardWriter


def one(number: int) -> tuple[Answer, Captured]:
    answer = Answer(str(number), (number, 1), (2, 3, 4), 0.0)
    best = torch.zeros(3, 16)
    example = Example(torch.tensor(answer.token_ids), torch.full((4, 8), float(number)).half(), best.long(), best.half())
    return answer, Captured(example)


def test_each_answer_is_written_once(tmp_path: Path) -> None:
    """Catches an answer counted twice in a fit: repeated in a shard, in a later one, or in a later run."""
    for _ in range(2):
        writer = ShardWriter(tmp_path, rows_per_shard=4)
        for number in (0, 1, 0, 2, 3, 1, 4):
            writer.add(*one(number))
        writer.close()
        writer.close()
    assert [int(example.features[0, 0]) for example in read_examples(tmp_path)] == [0, 1, 2, 3, 4]
    assert len(shard_paths(tmp_path)) == 2
    assert writer.report.tokens == 0


@pytest.mark.parametrize(
    ("checked", "reproduced", "holds"), [(50, 48, True), (50, 47, False), (9000, 8991, True), (9000, 8990, False)]
)
def test_near_ties_are_let_pass(checked: int, reproduced: int, holds: bool) -> None:
    """Catches a handful of answers refused for one tie, and a check that lets more than one in a thousand through."""
    assert CaptureReport(checked=checked, reproduced=reproduced).holds == holds


def test_nothing_is_written_that_fails_the_check(tmp_path: Path) -> None:
    """Catches features on disk that are not what the LM head reads."""
    writer = ShardWriter(tmp_path)
    answer, captured = one(0)
    writer.add(answer, replace(captured, checked=30, reproduced=20))
    with pytest.raises(EagleError, match=r"features-00000.safetensors not written: .*66.67 % of 30"):
        writer.close()
    assert shard_paths(tmp_path) == []

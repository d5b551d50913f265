from __future__ import annotations

import errno
import lzma
import os
from pathlib import Path

import pytest

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Answer, AnswerWriter, ReadReport, answered_ids, read_all, read_answers


def _answer(number: int, name: str | None = None) -> Answer:
    return Answer(name or f"a{number}", (1, 2, number), (3, number), 0.8)


def _write(folder: Path, *answers: Answer, rows_per_shard: int = 2) -> None:
    writer = AnswerWriter(folder, rows_per_shard)
    for answer in answers:
        writer.write(answer)
    writer.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Catches a lost field and a shard that is overwritten by the next one or by the next run."""
    _write(tmp_path, *map(_answer, range(5)))
    _write(tmp_path, _answer(5))
    assert list(read_answers(tmp_path)) == [_answer(i) for i in range(6)]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"answers-{i:05d}.jsonl" for i in range(4)]


def test_a_shard_cut_in_half_loses_one_row(tmp_path: Path) -> None:
    """Catches a torn line that stops reading, or that the next run appends to."""
    _write(tmp_path, _answer(0), _answer(1))
    shard = tmp_path / "answers-00000.jsonl"
    os.truncate(shard, shard.stat().st_size - 7)
    _write(tmp_path, _answer(2))
    report = ReadReport()
    assert [answer.id for answer in read_answers(tmp_path, report)] == ["a0", "a2"]
    assert report.torn == 1
    assert answered_ids(tmp_path) == {"a0", "a2"}


def test_rows_that_teach_nothing_are_counted(tmp_path: Path) -> None:
    """Catches repeated or empty answers that reach training, and reasons that are mixed up."""
    _write(tmp_path, _answer(0), Answer("again", (1, 2, 0), (3, 0), 0.0), Answer("none", (1,), (), 0.0))
    (tmp_path / "answers-00009.jsonl").write_text('{"id": "no tokens"}\n[1]\n')
    answers, report = read_all([tmp_path, tmp_path])
    assert [answer.id for answer in answers] == ["a0"]
    assert (report.torn, report.empty, report.repeated) == (4, 2, 3)


def test_rows_without_id_or_temperature_are_named(tmp_path: Path) -> None:
    """Catches data of other tools that is refused although it has the tokens."""
    path = tmp_path / "foreign.jsonl"
    path.write_text('{"q": "hi", "prompt_ids": [1], "out_ids": [2]}\n')
    (answer,) = read_answers(path)
    assert (answer.id[0], answer.token_ids) == ("q", (1, 2))


def test_compressed_answers_are_read(tmp_path: Path) -> None:
    """Catches answers kept beside a head that cannot be used again."""
    path = tmp_path / "answers.jsonl.xz"
    path.write_bytes(lzma.compress(f"{_answer(0).to_json()}\n{_answer(1).to_json()}\n".encode()))
    assert list(read_answers(path)) == [_answer(0), _answer(1)]


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback, or rows lost, when the disk is full."""
    writer = AnswerWriter(tmp_path)
    writer.write(_answer(0))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(EagleError, match="free some space and run again"):
            writer.write(_answer(1))
    assert list(read_answers(tmp_path)) == [_answer(0)]


def test_missing_answers_name_the_step() -> None:
    """Catches an empty data set that is trained on."""
    with pytest.raises(EagleError, match="run the generate step first"):
        list(read_answers(Path("nowhere")))

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Answer, Question, read_answers
from vllm_eagle.train.capture import CaptureConfig, capture
from vllm_eagle.train.features import Example, read_examples, shard_paths
from vllm_eagle.train.generate import GenerateConfig, generate
from vllm_eagle.train.shards import Captured
from vllm_eagle.train.target import Target


class LetterTokenizer:
    """Give each letter its code; the template marks the turns with < and >."""

    chat_template: Any = "toy"

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        return f"<{conversation[0]['content']}>" + ("A:" if options["add_generation_prompt"] else "")

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class Echo:
    """Answer with the question's length and remember what was asked; stop like a kill after `patience` answers."""

    def __init__(self, patience: int = 1000) -> None:
        self.asked: list[Question] = []
        self.patience = patience

    def __call__(self, questions: Iterable[Question], capture: bool) -> Iterator[tuple[Answer, Captured | None]]:
        for question in questions:
            if len(self.asked) == self.patience:
                raise KeyboardInterrupt
            self.asked.append(question)
            out = tuple(decode([ord("a") + len(self.asked) % 7]).encode())
            answer = Answer(question.id, question.prompt_ids, out, question.temperature)
            yield answer, zeros(answer) if capture else None


def zeros(answer: Answer) -> Captured:
    """Make states up that cannot be those of a target."""
    length, out = len(answer.token_ids), len(answer.out_ids)
    best = torch.zeros(out, 16)
    return Captured(Example(torch.tensor(answer.token_ids), torch.zeros(length - 1, 32).half(), best.long(), best.half()))


def _prompts(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_killed_run_asks_only_what_is_open(tmp_path: Path) -> None:
    """Catches answers that are generated twice or lost, and a temperature that changes on resume."""
    prompts = _prompts(tmp_path / "p.jsonl", [{"id": f"p{i}", "prompt": f"question {i}"} for i in range(10)])
    config = GenerateConfig(tmp_path / "out", prompts)
    first, second = Echo(patience=4), Echo()
    with pytest.raises(KeyboardInterrupt):
        generate(config, LetterTokenizer(), decode, first)
    generate(config, LetterTokenizer(), decode, second)
    assert [q.id for q in first.asked + second.asked] == [f"p{i}" for i in range(10)]
    whole = Echo()
    generate(GenerateConfig(tmp_path / "whole", prompts), LetterTokenizer(), decode, whole)
    assert [q.temperature for q in whole.asked] == [q.temperature for q in first.asked + second.asked]
    assert {q.temperature for q in whole.asked} == {0.0, 0.8}


def test_a_kill_while_capturing_loses_nothing(toy_target: Target, tmp_path: Path) -> None:
    """Catches features without their answer, answers whose features never come, and answers captured twice."""
    prompts = _prompts(tmp_path / "p.jsonl", [{"prompt": f"question {i}"} for i in range(70)])

    def config(folder: Path) -> GenerateConfig:
        return GenerateConfig(folder / "answers", prompts, capture=folder / "features")

    class Watched(Echo):
        """Copy what lies on disk once 68 answers are there: what a kill would leave."""

        def __call__(self, questions: Iterable[Question], capture: bool) -> Iterator[tuple[Answer, Captured | None]]:
            for number, answered in enumerate(super().__call__(questions, capture)):
                if number == 68:
                    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
                yield answered

    generate(config(tmp_path / "whole"), LetterTokenizer(), decode, Watched())
    killed, again = config(tmp_path / "killed"), Echo()
    assert killed.capture is not None
    assert (len(list(read_answers(killed.out))), len(read_examples(killed.capture))) == (68, 64)
    summary = generate(killed, LetterTokenizer(), decode, again)
    assert (len(again.asked), len(shard_paths(killed.capture))) == (2, 2)
    assert "2 answer tokens captured" in summary
    assert capture(CaptureConfig((killed.out,), killed.capture), toy_target).tokens == 4
    captured = [tuple(example.tokens.tolist()) for example in read_examples(killed.capture)]
    assert sorted(captured) == sorted(answer.token_ids for answer in read_answers(killed.out))
    assert len(captured) == 70


def test_only_answers_are_captured(tmp_path: Path) -> None:
    """Catches a data set with the questions the target wrote to itself, out of a conversation nobody has."""
    generate(GenerateConfig(tmp_path, self_prompted=9, capture=tmp_path / "f"), LetterTokenizer(), decode, Echo())
    answers = {answer.token_ids for answer in read_answers(tmp_path)}
    assert {tuple(example.tokens.tolist()) for example in read_examples(tmp_path / "f")} == answers


def test_bad_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    """Catches an empty or over-long prompt that reaches the engine, and a report that hides it."""
    rows: list[dict[str, Any]] = [
        {"prompt": " "},
        {"prompt": "ok"},
        {"prompt": "ok"},
        {"prompt": "x" * 600},
        {"nothing": 1},
        {"turns": ["two"]},
    ]
    prompts = _prompts(tmp_path / "p.jsonl", rows)
    prompts.write_text(prompts.read_text() + "{half a li")
    echo = Echo()
    summary = generate(GenerateConfig(tmp_path / "out", prompts), LetterTokenizer(), decode, echo)
    assert [decode(list(q.prompt_ids)) for q in echo.asked] == ["<ok>A:", "<two>A:"]
    assert "1 unreadable, 2 empty, 1 repeated, 1 longer than the limit" in summary


def test_sources_take_turns(tmp_path: Path) -> None:
    """Catches a run stopped early that has seen only the first source."""
    rows = [{"prompt": f"{source}{i}", "source": source} for source, count in (("a", 3), ("b", 1)) for i in range(count)]
    echo = Echo()
    config = GenerateConfig(tmp_path / "out", _prompts(tmp_path / "p.jsonl", rows), limit=3)
    generate(config, LetterTokenizer(), decode, echo)
    assert [decode(list(q.prompt_ids))[1:-3] for q in echo.asked] == ["a0", "b0", "a1"]


def test_the_target_writes_the_questions(tmp_path: Path) -> None:
    """Catches a question opening that closes the user's turn, and repeated questions that are answered again."""
    echo = Echo()
    generate(GenerateConfig(tmp_path, self_prompted=9), LetterTokenizer(), decode, echo)
    openings, asked = echo.asked[:9], echo.asked[9:]
    assert all(decode(list(q.prompt_ids)) == "<" and q.temperature == 1.0 for q in openings)
    assert len(asked) == len(list(read_answers(tmp_path))) == 7
    again = Echo()
    generate(GenerateConfig(tmp_path, self_prompted=9), LetterTokenizer(), decode, again)
    assert again.asked == []


def test_a_target_without_chat_template_is_named(tmp_path: Path) -> None:
    """Catches prompts fed bare to a model that was never told whose turn it is."""
    tokenizer = LetterTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(EagleError, match="no chat template"):
        generate(GenerateConfig(tmp_path, self_prompted=1), tokenizer, decode, Echo())


def test_a_template_that_opens_no_turn_is_named(tmp_path: Path) -> None:
    """Catches an empty prompt that reaches the engine when the target is to write a question."""

    class Bare(LetterTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
            return conversation[0]["content"]

    with pytest.raises(EagleError, match="nothing before a user's turn"):
        generate(GenerateConfig(tmp_path, self_prompted=1), Bare(), decode, Echo())


def test_equal_questions_are_counted(tmp_path: Path) -> None:
    """Catches a target that asks the same again and again, and a summary that does not say so."""
    summary = generate(GenerateConfig(tmp_path, self_prompted=9), LetterTokenizer(), decode, Echo())
    assert "2 repeated" in summary


def test_prompts_that_are_all_too_long_end_the_run(tmp_path: Path) -> None:
    """Catches a run that answered nothing and passes for success until the next step finds no data."""
    prompts = _prompts(tmp_path / "p.jsonl", [{"prompt": "x" * 600}])
    with pytest.raises(EagleError, match=r"none of the prompts was answered .*1 longer than the limit"):
        generate(GenerateConfig(tmp_path / "o", prompts), LetterTokenizer(), decode, Echo())


def test_no_usable_prompt_ends_the_run(tmp_path: Path) -> None:
    """Catches an empty data set that looks like success."""
    with pytest.raises(EagleError, match="no usable prompt"):
        generate(GenerateConfig(tmp_path / "o", _prompts(tmp_path / "p.jsonl", [])), LetterTokenizer(), decode, Echo())


@pytest.mark.parametrize("choice", [{}, {"prompts": Path("p"), "self_prompted": 3}])
def test_exactly_one_kind_of_prompt(choice: dict[str, Any]) -> None:
    """Catches a command line that asks for both or neither and silently does one."""
    with pytest.raises(EagleError, match="either --prompts FILE or --self-prompt COUNT"):
        GenerateConfig(Path("o"), **choice)

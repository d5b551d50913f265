"""Let the target answer prompts, each once over any number of interrupted runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Answer, AnswerWriter, Question, ReadReport, answered_ids, read_answers
from vllm_eagle.train.progress import Progress
from vllm_eagle.train.prompts import (
    ChatTokenizer,
    Prompt,
    PromptReport,
    Temperatures,
    interleave,
    question_openings,
    questions,
    read_prompts,
)
from vllm_eagle.train.shards import Captured, ShardWriter

Engine = Callable[[Iterable[Question], bool], Iterator[tuple[Answer, Captured | None]]]
"""Told whether to capture; called only when there is something to ask, so that a run with nothing to do starts no model."""


@dataclass(frozen=True)
class GenerateConfig:
    """Say what to answer and where to keep it; `prompts` None with `self_prompted` rows lets the target ask, too.

    With `capture` the features of the answers are kept in that folder, too.
    """

    out: Path
    prompts: Path | None = None
    self_prompted: int = 0
    limit: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_prompt_tokens: int = 512
    max_tokens: int = 300
    max_question_tokens: int = 128
    capture: Path | None = None

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.self_prompted == 0):
            raise EagleError("give either --prompts FILE or --self-prompt COUNT, not both and not neither")
        if not self.temperatures or min(self.temperatures) < 0:
            raise EagleError(f"--temperatures {self.temperatures} must be one or more numbers of 0 or above")


def generate(config: GenerateConfig, tokenizer: ChatTokenizer, decode: Callable[[list[int]], str], engine: Engine) -> str:
    """Answer what is not answered yet under `config.out`; return a one-line summary of what was done and left out."""
    report = PromptReport()
    features = ShardWriter(config.capture) if config.capture is not None else None
    prompts = _prompts(config, tokenizer, decode, engine, report)
    if not prompts:
        raise EagleError(f"no usable prompt in {config.prompts or 'the self-prompted questions'} ({report})")
    done = answered_ids(config.out)
    open_prompts = [prompt for prompt in prompts if prompt.id not in done]
    todo = questions(
        open_prompts, tokenizer, Temperatures(config.temperatures), config.max_prompt_tokens, config.max_tokens, report
    )
    progress = Progress("answers", len(prompts), len(prompts) - len(open_prompts))
    tokens = _write_all(config.out, _ask(engine, todo, features is not None), progress, features)
    if not tokens and len(open_prompts) == len(prompts):
        raise EagleError(f"none of the prompts was answered ({report})")
    captured = f"; {features.report}" if features is not None else ""
    return f"{tokens} new answer tokens in {config.out} ({report}){captured}"


def _prompts(
    config: GenerateConfig,
    tokenizer: ChatTokenizer,
    decode: Callable[[list[int]], str],
    engine: Engine,
    report: PromptReport,
) -> list[Prompt]:
    if config.prompts is not None:
        return interleave(read_prompts(config.prompts, report))[: config.limit]
    folder = config.out / "questions"
    names = [f"self-{i:06d}" for i in range(config.self_prompted)]
    done = answered_ids(folder)
    openings = question_openings(tokenizer, (name for name in names if name not in done), config.max_question_tokens)
    progress = Progress("questions", len(names), len(done.intersection(names)))
    _write_all(folder, _ask(engine, openings, False), progress)
    return _asked(folder, decode, report)


def _asked(folder: Path, decode: Callable[[list[int]], str], report: PromptReport) -> list[Prompt]:
    """Turn self-written questions into prompts; equal and empty ones are dropped and counted."""
    prompts: dict[str, Prompt] = {}
    rows = ReadReport()
    for row in read_answers(folder, rows):
        text = decode(list(row.out_ids)).strip()
        if not text:
            report.empty += 1
        elif text in prompts:
            report.repeated += 1
        else:
            prompts[text] = Prompt(row.id, text, "self-prompted")
    report.unreadable += rows.torn
    report.empty += rows.empty
    report.repeated += rows.repeated
    return list(prompts.values())


def _ask(engine: Engine, asked: Iterator[Question], capture: bool) -> Iterator[tuple[Answer, Captured | None]]:
    for first in asked:
        yield from engine(itertools.chain([first], asked), capture)


def _write_all(
    folder: Path,
    answered: Iterator[tuple[Answer, Captured | None]],
    progress: Progress,
    features: ShardWriter | None = None,
) -> int:
    """Write each answer at once and its features a shard at a time: what a kill takes of these, `capture` makes up for."""
    writer = AnswerWriter(folder)
    try:
        for answer, captured in answered:
            writer.write(answer)
            if features is not None and captured is not None:
                features.add(answer, captured)
            progress.add(len(answer.out_ids))
    finally:
        writer.close()
        if features is not None:
            features.close()
    return progress.tokens

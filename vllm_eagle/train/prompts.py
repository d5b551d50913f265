"""Prompts to answer: read, tokenise with the target's chat template, order, and give each its temperature."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Question

_MARK = "\u241fquestion\u241f"


class ChatTokenizer(Protocol):
    """Name the part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...
    def encode(self, text: str, **options: Any) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """Hold one user turn; `source` groups prompts of one origin."""

    id: str
    text: str
    source: str = ""


@dataclass
class PromptReport:
    """Count prompts left out, and why."""

    unreadable: int = 0
    empty: int = 0
    repeated: int = 0
    too_long: int = 0

    def __str__(self) -> str:
        return (
            f"skipped: {self.unreadable} unreadable, {self.empty} empty, "
            f"{self.repeated} repeated, {self.too_long} longer than the limit"
        )


def read_prompts(path: Path, report: PromptReport) -> list[Prompt]:
    """Read prompts from `.jsonl` (or `.gz` of it): `prompt`, `text` or first of `turns`; `id` or `question_id` if present."""
    if not path.is_file():
        raise EagleError(f"no prompts at {path}; give a .jsonl file with a field prompt, text or turns in each row")
    prompts: dict[str, Prompt] = {}
    names: set[str] = set()
    for line in _text(path).splitlines():
        try:
            prompt = _parse(json.loads(line))
        except (ValueError, KeyError, IndexError, TypeError):
            report.unreadable += 1
            continue
        if not prompt.text.strip():
            report.empty += 1
        elif prompt.text in prompts or prompt.id in names:
            report.repeated += 1
        else:
            prompts[prompt.text] = prompt
            names.add(prompt.id)
    return list(prompts.values())


def _text(path: Path) -> str:
    if path.suffix != ".gz":
        return path.read_text(errors="replace")
    try:
        with gzip.open(path, "rt", errors="replace") as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as bad:
        raise EagleError(f"{path} cannot be unpacked ({bad}); copy it again") from None


def _parse(row: dict[str, Any]) -> Prompt:
    text = str(row["turns"][0] if "turns" in row else row.get("prompt", row.get("text")) or "")
    name = row.get("id", row.get("question_id")) or "p" + hashlib.sha1(text.encode()).hexdigest()[:11]
    return Prompt(str(name), text, str(row.get("source", row.get("category", ""))))


def interleave(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Take one prompt of each `source` in turn, so that a run stopped early has seen all of them."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.source].append(prompt)
    longest = max(map(len, groups.values()), default=0)
    return [group[i] for i in range(longest) for group in groups.values() if i < len(group)]


@dataclass(frozen=True)
class Temperatures:
    """Choose a temperature for each prompt by its `id` alone, so that a resumed run makes the same choice."""

    values: tuple[float, ...] = (0.0, 0.8)

    def of(self, name: str) -> float:
        return self.values[int(hashlib.sha1(name.encode()).hexdigest(), 16) % len(self.values)]


def questions(
    prompts: Iterable[Prompt],
    tokenizer: ChatTokenizer,
    temperatures: Temperatures,
    max_prompt_tokens: int,
    max_tokens: int,
    report: PromptReport,
) -> Iterator[Question]:
    """Tokenise prompts with the chat template; one longer than `max_prompt_tokens` is skipped and counted."""
    for prompt in prompts:
        text = _render(tokenizer, prompt.text, answer=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > max_prompt_tokens:
            report.too_long += 1
            continue
        yield Question(prompt.id, tuple(ids), temperatures.of(prompt.id), max_tokens)


def prompt_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Tokenise a prompt, with the chat template where there is one."""
    if not tokenizer.chat_template:
        return tokenizer.encode(text)
    return tokenizer.encode(_render(tokenizer, text, answer=True), add_special_tokens=False)


def question_openings(tokenizer: ChatTokenizer, names: Iterable[str], max_tokens: int) -> Iterator[Question]:
    """Yield the chat template up to the user's turn: the target, sampled at 1.0, writes the question itself."""
    opening = _render(tokenizer, _MARK, answer=False).partition(_MARK)[0]
    ids = tuple(tokenizer.encode(opening, add_special_tokens=False))
    if not ids:
        raise EagleError("the target's chat template has nothing before a user's turn, so it cannot write one; give --prompts")
    for name in names:
        yield Question(name, ids, 1.0, max_tokens)


def _render(tokenizer: ChatTokenizer, text: str, answer: bool) -> str:
    if not tokenizer.chat_template:
        raise EagleError("the target's tokenizer has no chat template; use an instruction-tuned target")
    turn = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=answer))

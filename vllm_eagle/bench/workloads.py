"""The prompts of a run, tokenised once for all contestants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_eagle.errors import EagleError
from vllm_eagle.train.prompts import ChatTokenizer, Prompt, PromptReport, interleave, prompt_ids, read_prompts


@dataclass(frozen=True)
class Workload:
    """Name prompts of one kind."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    too_long: int = 0
    """How many were passed over for their length."""


def read_workload(spec: str, tokenizer: ChatTokenizer, count: int, longest: int) -> Workload:
    """Take `count` prompts of FILE or FILE:CATEGORY, each category in turn; raises `EagleError`."""
    file, colon, category = (spec, "", "") if Path(spec).is_file() else spec.rpartition(":")
    path = Path(file if colon else spec)
    found = read_prompts(path, PromptReport())
    sources = sorted({prompt.source for prompt in found} - {""})
    if colon:
        found = [prompt for prompt in found if prompt.source == category]
        if not found:
            raise EagleError(f"no prompt of category {category!r} in {path}; there are: {', '.join(sources) or 'none'}")
    stem = path.name.split(".")[0]
    return tokenise(f"{stem}:{category}" if colon else stem, interleave(found), tokenizer, count, longest)


def tokenise(name: str, prompts: Sequence[Prompt], tokenizer: ChatTokenizer, count: int, longest: int) -> Workload:
    """Take the first `count` prompts of at most `longest` tokens; raises `EagleError` if there is none."""
    taken: list[tuple[int, ...]] = []
    passed = 0
    for prompt in prompts:
        ids = tuple(prompt_ids(tokenizer, prompt.text))
        if 0 < len(ids) <= longest:
            taken.append(ids)
        else:
            passed += 1
        if len(taken) == count:
            break
    if not taken:
        raise EagleError(f"no prompt of {name} has at most {longest} tokens; raise --max-prompt-tokens")
    return Workload(name, tuple(taken), passed)

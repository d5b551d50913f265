"""A finite pool of random requests and what plain decoding answers each, alone: computed once, compared thousands of times."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from vllm import LLM

from tests.integration.harness import LETTERS, THINK
from tests.integration.random_requests import Request, RequestMaker, run

HEADS = (0, 0, 0, 32, 64)
"""How many tokens of a common document a prompt may begin with: full blocks for the prefix cache."""


@dataclass(frozen=True)
class Case:
    """A request and plain decoding's output."""

    request: Request
    want: Any

    def texts(self) -> list[list[int]]:
        """Return prompt and continuation of every output, for a drafter that knows them."""
        return [self.request.prompt + list(out.token_ids) for out in self.want.outputs]


def draw_requests(seed: int, count: int, words: list[str]) -> list[Request]:
    """Draw requests with any sampling parameter; many share the beginning of their prompt, some write long."""
    draw, make = random.Random(seed), RequestMaker(seed, LETTERS, words, THINK)
    documents = [draw.choices(LETTERS, k=max(HEADS)) for _ in range(3)]
    return [_at_length(make(), draw, documents) for _ in range(count)]


def _at_length(request: Request, draw: random.Random, documents: list[list[int]]) -> Request:
    """Let most requests write through several blocks, and begin most prompts with a part of a document."""
    params = dict(request.params)
    if draw.random() < 0.75:
        for early in ("stop", "stop_token_ids", "min_tokens", "repetition_detection"):
            params.pop(early, None)
        params |= {"ignore_eos": True, "max_tokens": draw.choice([60, 100, 150])}
    head = draw.choice(documents)[: draw.choice(HEADS)]
    return dataclasses.replace(request, prompt=head + request.prompt, params=params)


def words_of(llm: LLM) -> list[str]:
    """Return single letters and pairs, as text."""
    tokenizer = llm.get_tokenizer()
    words = [text for token in LETTERS if (text := tokenizer.decode([token])).strip()]
    return words + [words[i] + words[(7 * i) % len(words)] for i in range(len(words))]


def answer(llm: LLM, requests: list[Request]) -> list[Case]:
    """Ask a plain engine for each request alone: in company, vLLM 0.32 mixes up thinking budgets."""
    return [Case(request, run(llm, [request])[0]) for request in requests]

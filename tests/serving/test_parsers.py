"""Reasoning and tool calls out of runs of several tokens: the message is the one vLLM's parsers make (scenario 85)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer

from tests.serving.cases import DEPTH, FREE, LATE, REPLIES, Plain, ask_all, scripted
from tests.serving.server import NAME, Server, joined, unlike

DEPTHS = range(DEPTH + 1)


@pytest.mark.parametrize("name", REPLIES)
def test_85_whole_messages(plain: Plain, trees: Server, name: str) -> None:
    """Catches a reply that changes with the depth to which drafts are right."""
    asked = [scripted(plain.target, REPLIES[name], depth) for depth in DEPTHS]
    for answer in ask_all(trees, asked):
        assert not unlike(plain.whole[name], answer)


@pytest.mark.parametrize("name", REPLIES)
def test_85_streamed_messages(plain: Plain, trees: Server, name: str) -> None:
    """Catches a message put together from chunks that differs from the one vLLM's parsers make of such runs."""
    asked = [scripted(plain.target, REPLIES[name], depth) for depth in DEPTHS]
    single = plain.streamed[name]
    for depth, answer in zip(DEPTHS, ask_all(trees, asked, stream=True), strict=True):
        message, runs = answer.choices[0], [run for run in answer.runs if run]
        assert max(answer.speculation["per_step_accepted"]) == depth
        assert message["ids"] == single.choices[0]["ids"]
        made = fed(plain.target, asked[depth], message["ids"], runs)
        assert made == {part: message[part] for part in made}
        if runs[0] == 1 and name != LATE:
            assert not unlike(single, answer)


def test_85_what_the_parser_does_alone(plain: Plain) -> None:
    """Shows vLLM's own flaw: it leaves <think> in the reasoning if one delta holds more than that, whoever made the delta."""
    ids = plain.whole[LATE].choices[0]["ids"]
    body = plain.bodies[LATE]
    apart = fed(plain.target, body, ids, [1] * len(ids))
    together = fed(plain.target, body, ids, [1, 2] + [1] * (len(ids) - 3))
    assert apart["reasoning"].replace("\n", "\n<think>") == together["reasoning"]
    assert apart["content"] == together["content"]


def fed(target: str, body: dict[str, Any], ids: Sequence[int], runs: Sequence[int]) -> dict[str, Any]:
    """Return the message vLLM's own parsers make of ids that come in runs, fed to them without a server."""
    parser_class, tokenizer = parsers(target)
    request = ChatCompletionRequest.model_validate(FREE | body | {"model": NAME})
    parser = parser_class(tokenizer, request.tools, chat_template_kwargs={}, model_config=None)
    request = parser.adjust_request(request)
    prompt = tokenizer.apply_chat_template(body["messages"], return_dict=False)
    chunks, first = [], 0
    for run in runs:
        part = list(ids[first : first + run])
        first += run
        finished = first == len(ids)
        text = tokenizer.decode(part[:-1] if finished and part[-1] == 1 else part)
        delta = parser.parse_delta(text, part, request, prompt_token_ids=prompt, finished=finished)
        choice = {"index": 0, "token_ids": part, "finish_reason": None, "delta": delta.model_dump() if delta else {}}
        chunks.append({"choices": [choice]})
    made = joined(chunks).choices[0]
    return {part: made[part] for part in ("content", "reasoning", "calls")}


@functools.cache
def parsers(target: str) -> tuple[Any, Any]:
    tokenizer = get_tokenizer(target)
    return ParserManager.get_parser("hermes", "deepseek_r1", enable_auto_tools=True, tokenizer=tokenizer), tokenizer

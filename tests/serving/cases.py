"""What is asked of a server, and what a server without trees returned."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import psutil

from tests.serving.server import NAME, PATIENCE, Answer, Server

PRINTABLE = [*range(4, 98), 224]
"""Tokens of the tiny target with letters that are ASCII characters."""
DEPTH = 6
NODES = 2 * DEPTH + DEPTH - 1  # of the drafter's trees: a pair per level, and the wrong one's child
TOKENS = 24
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", "32"]
PARSERS = ["--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
REPORT = ["--per-request-spec-decode-metrics", "detailed"]
SCRIPTED = ["--logits-processors", "tests.serving.doubles:Script"]

FREE: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "allowed_token_ids": PRINTABLE}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
PROMPT = "6 grey geese"  # the digit is the depth to which the drafter is right
SIX = [*range(68, 74)]  # so few that every run repeats some
TOLD: dict[str, Any] = {"messages": [{"role": "system", "content": "6"}, {"role": "user", "content": "geese"}]}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": PROMPT, "logprobs": 2},
    "seeded": {"prompt": PROMPT, "logprobs": 2} | SEEDED,
    "warm": {"prompt": PROMPT, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 1},
    "three of each": {"prompt": PROMPT, "n": 3, "logprobs": 1} | SEEDED,
    "several prompts": {"prompt": [f"{i} geese" for i in (6, 0, 3, 1)], "logprobs": 1},
    "several prompts, two of each": {"prompt": ["2 geese", "6 swans"], "n": 2} | SEEDED,
    "prompts as ids": {"prompt": [[25, 70, 71], [22, 90, 60, 50]]},
    "echo": {"prompt": PROMPT, "echo": True, "return_token_ids": False},
    "echo with logprobs": {"prompt": PROMPT, "echo": True, "logprobs": 2},
    "echo alone": {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": False},
    "one token": {"prompt": PROMPT, "max_tokens": 1, "logprobs": 1},
    "two tokens": {"prompt": PROMPT, "max_tokens": 2},
    "penalties among six letters": {
        "prompt": PROMPT,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.9,
        "allowed_token_ids": SIX,
    },
    "repetition penalty": {"prompt": PROMPT, "repetition_penalty": 1.5, "allowed_token_ids": SIX} | SEEDED,
    "bias": {"prompt": PROMPT, "logit_bias": {"40": 3.0, "70": -100.0}, "min_p": 0.02} | SEEDED,
    "any bytes": {"prompt": PROMPT, "allowed_token_ids": None} | SEEDED,
    "chat": {**TOLD, "logprobs": True, "top_logprobs": 2},
    "chat, seeded": {**TOLD, "logprobs": True} | SEEDED,
    "chat, three of each": {**TOLD, "n": 3, "logprobs": True} | SEEDED,
    "chat, one token": {**TOLD, "max_tokens": 1},
    "chat, any bytes": {**TOLD, "allowed_token_ids": None} | SEEDED,
}
STOPS: dict[str, Callable[[str, list[int]], dict[str, Any]]] = {
    **{f"stop string at {at}": lambda text, ids, at=at: {"prompt": PROMPT, "stop": [text[at : at + 3]]} for at in (5, 6, 7, 8)},
    "stop string kept": lambda text, ids: {"prompt": PROMPT, "stop": [text[9:11]], "include_stop_str_in_output": True},
    "one of two stop strings": lambda text, ids: {"prompt": PROMPT, "stop": ["~~~~", text[6:8]], "logprobs": 1},
    "stop token": lambda text, ids: {"prompt": PROMPT, "stop_token_ids": [ids[7]], "logprobs": 1},
    "stop behind min_tokens": lambda text, ids: {"prompt": PROMPT, "stop_token_ids": [ids[3]], "min_tokens": 9},
}
"""Made of what the case "greedy" writes: the place of the stop is known then."""
CROWD = [{"prompt": f"{i % 7} of {i}", "logprobs": 1} | (SEEDED | {"seed": i} if i % 3 == 2 else {}) for i in range(16)]
LONG = [{"prompt": f"{i} long", "max_tokens": 150} | (SEEDED if i % 2 else {}) for i in range(6)]
"""Outlive clients that leave."""
ENDLESS = 500  # tokens of those that a SIGTERM meets

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "x\\n"}]}}\n</tool_call>'
LATE = "a line before the reasoning"
REPLIES = {
    "reasoning and a call": f"<think>Add them.\n</think>\n\n{CALL}",
    "reasoning, text and two calls": f"<think>First add.</think>I add. {CALL}\n{CALL.replace('add', 'mul')}",
    "reasoning without its start": f"Just add.</think>{CALL}",
    "no reasoning": f"<think></think>{CALL}",
    "text alone": "<think>Easy, 3 < 4.</think>The sum is 3, not <tool_cal or {}.",
    "never ends thinking": "<think>If a<b then <tool",
    LATE: "\n<think>Add.</think>Done.",
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "mul")
]


def ask(server: Server, body: dict[str, Any], stream: bool = False) -> Answer:
    body = FREE | body
    return (server.chat if "messages" in body else server.complete)(stream=stream, **body)


def ask_all(server: Server, bodies: list[dict[str, Any]], stream: bool = False) -> list[Answer]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda body: ask(server, body, stream), bodies))


def scripted(target: str, reply: str, depth: int) -> dict[str, Any]:
    """A chat request whose answer is `reply`, drafted right to a depth."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(target)(reply)["input_ids"]
    return {
        "messages": [{"role": "user", "content": f"{depth} is my depth"}],
        "tools": TOOLS,
        "max_tokens": 400,
        "ignore_eos": False,
        "allowed_token_ids": None,
        "vllm_xargs": {"script": [*ids, 1]},
    }


@dataclass
class Reader:
    """What one client had read when its stream ended."""

    text: str = ""
    outcome: str = "cut"


@dataclass
class Ending:
    """What a SIGTERM did while requests ran."""

    status: int
    readers: list[Reader]
    left: list[psutil.Process]
    errors: set[str]
    """Logged since."""


def end(server: Server, drains: bool = False) -> Ending:
    """Send SIGTERM to a server once every one of its clients has begun to read.

    By default vLLM kills its engine then, and its HTTP server waits for the clients, who get nothing more: they leave here.
    """
    family, behind = server.family(), len(server.log.read_text())
    readers = asyncio.run(_read_until_the_end(server, drains))
    status = server.process.wait(PATIENCE)
    return Ending(status, readers, psutil.wait_procs(family, timeout=30)[1], server.errors(behind))


async def _read_until_the_end(server: Server, drains: bool) -> list[Reader]:
    readers, begun = [Reader() for _ in LONG], [asyncio.Event() for _ in LONG]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        reading = [asyncio.create_task(_read(client, *each)) for each in zip(LONG, readers, begun, strict=True)]
        await asyncio.gather(*[event.wait() for event in begun])
        server.process.send_signal(signal.SIGTERM)
        while not drains and server.process.poll() is None and "engine client stopped" not in server.log.read_text():
            await asyncio.sleep(0.1)
        for task in reading:
            if not drains:
                task.cancel()
        await asyncio.wait(reading)
    return readers


async def _read(client: openai.AsyncOpenAI, body: dict[str, Any], reader: Reader, begun: asyncio.Event) -> None:
    body = FREE | body | {"max_tokens": ENDLESS}
    try:
        stream = await client.completions.create(model=NAME, prompt=body.pop("prompt"), stream=True, extra_body=body)
        async with stream:
            async for chunk in stream:
                if reader.text:
                    begun.set()
                reader.text += chunk.choices[0].text
                reader.outcome = chunk.choices[0].finish_reason or reader.outcome
    except (openai.APIError, httpx.HTTPError) as bad:
        reader.outcome = type(bad).__name__


@dataclass
class Plain:
    """What the server without trees returned."""

    target: str
    whole: dict[str, Answer] = field(default_factory=dict)
    streamed: dict[str, Answer] = field(default_factory=dict)
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    crowd: list[Answer] = field(default_factory=list)
    long: list[Answer] = field(default_factory=list)
    ending: Ending | None = None

    def texts(self) -> list[list[int]]:
        """Return every text in token ids."""
        asked = [*self.whole.values(), *self.crowd, *self.long]
        return [text for answer in asked for text in answer.texts if len(text) > 2]

    def record(self, server: Server, bodies: dict[str, dict[str, Any]]) -> None:
        """Ask for these, whole and streamed."""
        self.bodies |= bodies
        for stream, kept in ((False, self.whole), (True, self.streamed)):
            kept |= dict(zip(bodies, ask_all(server, list(bodies.values()), stream), strict=True))

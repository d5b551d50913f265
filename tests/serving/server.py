"""Start `vllm serve`, ask it through the `openai` client, and stop it; whole and streamed answers take one shape."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil

ROOT = Path(__file__).parent.parent.parent
NAME = "tiny"
PATIENCE = 600  # seconds until something that never comes is given up


@dataclass
class Answer:
    """What one request returned, put together from its chunks if it was streamed."""

    choices: dict[int, dict[str, Any]]
    usage: dict[str, int]
    prompts: list[list[int]] = field(default_factory=list)
    """Every choice's, unless streamed."""
    runs: list[int] = field(default_factory=list)
    """Tokens of every chunk."""
    speculation: dict[str, Any] = field(default_factory=dict)
    """What vLLM reports about a single sequence, if the server was asked to."""

    @property
    def texts(self) -> list[list[int]]:
        """Return prompt and output ids of every choice."""
        return [self.prompts[index % len(self.prompts)] + choice["ids"] for index, choice in self.choices.items()]


class Server:
    """A running server, and every process it has started."""

    def __init__(self, log: Path, model: str, flags: Iterable[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        wanted = {"PATH": path, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        command = ["vllm", "serve", model, "--port", str(self.port), "--served-model-name", NAME, *flags]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | wanted, cwd=log.parent, start_new_session=True
            )
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def wait(self) -> None:
        """Wait until it answers."""
        for _ in range(2 * PATIENCE):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def complete(self, *, stream: bool = False, **body: Any) -> Answer:
        """Ask for completions."""
        return self._ask(self.client.completions.create, stream, body, "prompt")

    def chat(self, *, stream: bool = False, **body: Any) -> Answer:
        """Ask for a chat message."""
        return self._ask(self.client.chat.completions.create, stream, body, "messages")

    def _ask(self, create: Callable[..., Any], stream: bool, body: dict[str, Any], first: str) -> Answer:
        body = {"return_token_ids": True} | body
        common = {"model": NAME, first: body.pop(first), "extra_body": body}
        if not stream:
            return whole(create(**common).model_dump())
        with create(**common, stream=True, stream_options={"include_usage": True}) as chunks:
            return joined(chunk.model_dump() for chunk in chunks)

    def metrics(self) -> Counter[str]:
        """Return vLLM's metrics, summed over their labels, without the prefix."""
        found: Counter[str] = Counter()
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        for name, value in re.findall(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.M):
            found[name] += float(value)
        return found

    def family(self) -> list[psutil.Process]:
        """Return the server's process and all below it."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def errors(self, behind: int) -> set[str]:
        """Return the kinds of errors in its log behind a place, without numbers and names of processes."""
        lines = re.findall(r"(?:ERROR|Traceback|\w+Error\b|\w+Exception\b).*", self.log.read_text()[behind:])
        return {re.sub(r"\d+", "N", line) for line in lines}


@contextmanager
def serving(log: Path, model: str, *flags: str) -> Iterator[Server]:
    """Run a server for a while; whatever is left of it at the end is killed."""
    server = Server(log, model, flags)
    try:
        server.wait()
        yield server
    finally:
        server.client.close()
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(30)
            except subprocess.TimeoutExpired:
                server.process.kill()


def whole(answer: dict[str, Any]) -> Answer:
    """Read an answer that came in one piece."""
    choices = {choice["index"]: _choice(choice, choice.get("message") or {}) for choice in answer["choices"]}
    prompts = [answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or [] for choice in answer["choices"]]
    runs = [len(choice["ids"]) for choice in choices.values()]
    return Answer(choices, _usage(answer["usage"]), prompts, runs, _speculation(answer))


def joined(chunks: Iterable[dict[str, Any]]) -> Answer:
    """Put the chunks of a streamed answer together."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    speculation: dict[str, Any] = {}
    runs = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            part = _choice(choice, choice.get("delta") or {})
            runs.append(len(part["ids"]))
            before = choices.get(choice["index"])
            assert before is None or before["finish"] is None  # nothing behind the end
            choices[choice["index"]] = part if before is None else _add(before, part)
        if chunk.get("usage"):
            usage, speculation = _usage(chunk["usage"]), _speculation(chunk)
    return Answer(choices, usage, runs=runs, speculation=speculation)


def _choice(choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": choice.get("text") or "",
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": _calls(message.get("tool_calls") or []),
        "ids": list(choice.get("token_ids") or []),
        "logprobs": _logprobs(choice.get("logprobs") or {}),
        "finish": choice["finish_reason"],
        "stop": choice.get("stop_reason"),
    }


def _calls(calls: list[dict[str, Any]]) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {}
    for place, call in enumerate(calls):
        mine = found.setdefault(call.get("index", place), {"name": "", "arguments": ""})
        for name in mine:
            mine[name] += call["function"].get(name) or ""
    return found


def _logprobs(given: dict[str, Any]) -> list[Any]:
    """Return one entry per token, for either endpoint."""
    if "tokens" not in given:
        return list(given.get("content") or [])
    columns = [given[name] or [] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")]
    return [list(entry) for entry in zip(*columns, strict=True)]


def _add(before: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    calls = {index: dict(call) for index, call in before["calls"].items()}
    for index, call in part["calls"].items():
        mine = calls.setdefault(index, {"name": "", "arguments": ""})
        for name, value in call.items():
            mine[name] += value
    parts = {name: before[name] + part[name] for name in ("text", "content", "reasoning", "ids", "logprobs")}
    return parts | {"calls": calls, "finish": part["finish"], "stop": part["stop"]}


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _speculation(answer: dict[str, Any]) -> dict[str, Any]:
    return (answer.get("metrics") or {}).get("speculative_decoding") or {}


def differences(one: Any, two: Any, at: str = "") -> list[str]:
    """Say where two answers differ; logprobs may do so by rounding."""
    if isinstance(one, float) and isinstance(two, float):
        return [] if abs(one - two) < 1e-3 else [f"{at}: {one} and {two}"]
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [found for key in one for found in differences(one[key], two[key], f"{at}.{key}")]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return [found for i, pair in enumerate(zip(one, two, strict=True)) for found in differences(*pair, f"{at}[{i}]")]
    return [] if one == two else [f"{at}: {one!r} and {two!r}"]


def unlike(one: Answer, two: Answer) -> list[str]:
    """Say where two answers differ, the size of their chunks aside."""
    return differences([one.choices, one.usage], [two.choices, two.usage])

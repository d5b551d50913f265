"""Ask replicas from several clients at once, and print who answered what."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_eagle.demo.prompts import PROMPTS
from vllm_eagle.deploy.application import replicated
from vllm_eagle.deploy.local import serving, tree_metrics
from vllm_eagle.errors import EagleError

NAME = "demo"
_EXPORTED = 60.0
"""Seconds after which Ray has exported the numbers, or never will."""


@dataclass(frozen=True)
class Answer:
    """Hold what one request returned."""

    replica: str
    prompt: str
    text: str
    tokens: int


def show(model: Path, head: Path, *, replicas: int, clients: int, tokens: int, port: int) -> int:
    """Start, ask, print and stop; return 0 if every replica has answered and drafted."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    arguments = {"model": model, "speculative-model": head, "served-model-name": NAME, "speculative-tree-size": 8}
    arguments |= {"dtype": "float32", "enforce-eager": True, "max-model-len": 1024, "max-num-seqs": 8}
    arguments["kv-cache-memory-bytes"] = 1 << 28
    app = replicated(arguments, num_replicas=replicas, ray_actor_options={"num_cpus": 1})
    print(f"starting {replicas} replicas (a minute on two free cores)", flush=True)
    began = time.monotonic()
    with serving(app, port=port, cpus=replicas, logs=False) as url:
        print(f"{url} answers after {time.monotonic() - began:.0f} seconds", flush=True)
        began = time.monotonic()
        answers = []
        with ThreadPoolExecutor(clients) as pool:
            for answer in pool.map(lambda prompt: ask(url, prompt, tokens), PROMPTS):
                print(f"[{answer.replica}] {answer.prompt}\n    {' '.join(answer.text.split())[:100]} ...", flush=True)
                answers.append(answer)
        seconds = time.monotonic() - began
        counts = exported({answer.replica for answer in answers})
    print(table(answers, counts, seconds))
    drafting = [name for name, found in counts.items() if found.get("num_drafts_total")]
    return 0 if len(drafting) == replicas else 1


def ask(url: str, prompt: str, tokens: int) -> Answer:
    """Ask one question, greedy; raises `EagleError` if there is no answer."""
    body = {"model": NAME, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            found, replica = json.load(response), response.headers["x-replica"]
    except OSError as wrong:  # refused, broken off, or an HTTP status
        raise EagleError(f"a request failed ({wrong}): was a replica killed? Ray does so where memory runs short") from None
    return Answer(replica, prompt, found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"])


def exported(names: set[str]) -> dict[str, dict[str, float]]:
    """Return the numbers of trees by replica, once those of all are there; Ray collects them every few seconds."""
    end = time.monotonic() + _EXPORTED
    while True:
        found = tree_metrics()
        if names <= {name for name, counts in found.items() if counts.get("num_drafts_total")} or time.monotonic() > end:
            time.sleep(3)  # a last collection, so that all tokens are counted
            return tree_metrics()
        time.sleep(0.5)


def table(answers: Iterable[Answer], counts: dict[str, dict[str, float]], seconds: float) -> str:
    """Return a line for each replica."""
    answers = list(answers)
    requests, written = Counter(answer.replica for answer in answers), sum(answer.tokens for answer in answers)
    lines = [f"\n{'replica':<12}{'requests':>10}{'trees':>8}{'drafted':>10}{'accepted':>10}{'accepted per tree':>20}"]
    for name in sorted(requests | counts):
        found = counts.get(name, {})
        trees, drafted, accepted = (found.get(f"num_{key}_total", 0.0) for key in ("drafts", "draft_tokens", "accepted_tokens"))
        share = accepted / max(1.0, trees)
        lines.append(f"{name:<12}{requests[name]:>10}{trees:>8.0f}{drafted:>10.0f}{accepted:>10.0f}{share:>20.2f}")
    return "\n".join([*lines, f"{written} tokens in {seconds:.1f} seconds, {written / seconds:.1f} a second\n"])

"""Requests drawn from the server's own OpenAPI page by schemathesis: sound, broken, and good ones with a few drawn fields."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz.bodies import CHAT, COMPLETIONS, GOOD_CHAT, MESSAGES, Raw
from tests.fuzz.server import GOOD, JSON, NAME

GOOD_BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: GOOD,
    CHAT: GOOD_CHAT,
    "/v1/responses": {"model": NAME, "input": "abba", "temperature": 0, "max_output_tokens": 24},
    "/v1/messages": {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 24},
    "/v1/messages/count_tokens": {"model": NAME, "messages": MESSAGES},
    "/v1/chat/completions/batch": GOOD_CHAT | {"messages": [MESSAGES, MESSAGES]},
    "/generative_scoring": {"model": NAME, "query": "ab", "items": ["a", "b"], "label_token_ids": [70, 71]},
    "/tokenize": {"model": NAME, "prompt": "abba"},
    "/detokenize": {"model": NAME, "tokens": [70, 71]},
}
"""Every path that takes a body, but those that change what the server is: no scaling, pausing or loading."""
MOST = {"n": 3, "best_of": 3, "max_tokens": 40, "max_completion_tokens": 40, "max_output_tokens": 40, "min_tokens": 40}
"""Larger numbers only take longer."""


def draw_requests(page: dict[str, Any], examples: int, seed: int) -> list[Raw]:
    """Draw `examples` sound and as many broken bodies for each path, and turn each into two requests."""
    chance = random.Random(seed)
    found: list[Raw] = []
    for path in sorted(GOOD_BODIES.keys() & page["paths"].keys()):
        for body in _bodies(page, path, examples, seed):
            found.append(_request(path, _tame(body)))
            if isinstance(body, dict) and body:
                some = chance.sample(sorted(body), min(len(body), chance.randint(1, 3)))
                found.append(_request(path, _tame({"seed": 7, **GOOD_BODIES[path], **{name: body[name] for name in some}})))
    return found


def _bodies(page: dict[str, Any], path: str, examples: int, seed: int) -> Iterator[Any]:
    import schemathesis
    from schemathesis import GenerationMode

    operation = schemathesis.openapi.from_dict(page)[path]["POST"]
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        yield from (case.body for case in _draw(operation.as_strategy(generation_mode=mode), examples, seed))


def _draw(strategy: Any, examples: int, seed: int) -> list[Any]:
    import hypothesis

    drawn: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        drawn.append(value)

    collect()
    return drawn


def _request(path: str, body: Any) -> Raw:
    try:
        return "POST", path, json.dumps(body).encode(), JSON
    except TypeError:  # bytes, or no body at all
        return "POST", path, body if isinstance(body, bytes) else None, JSON


def _tame(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    wild = {name: most for name, most in MOST.items() if isinstance(body.get(name), int) and body[name] > most}
    return body | wild

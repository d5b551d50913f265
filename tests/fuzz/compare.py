"""Send the same requests to a server with trees and to one without, and say where trees do worse."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.bodies import Raw
from tests.fuzz.server import Reply, Server

EVERY = 50
"""Requests between two looks at the text of a good one."""


@dataclass
class Record:
    """What one kind of server did with every request."""

    requests: list[Raw] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)
    """Requests after which the server was gone."""
    texts: set[str] = field(default_factory=set)
    """Answers to a request that is always the same; one is right."""

    def statuses(self) -> Counter[int]:
        """Count the statuses."""
        return Counter(reply.status for reply in self.replies)


def record(
    start: Callable[[], AbstractContextManager[Server]], choose: Callable[[Server], list[Raw]], say: Callable[[str], None]
) -> Record:
    """Send what is chosen one by one; a server that dies is started again for the rest."""
    found = Record()
    while not found.requests or len(found.replies) < len(found.requests):
        with start() as server:
            found.requests = found.requests or choose(server)
            _send_until_death(server, found, say)
    return found


def _send_until_death(server: Server, found: Record, say: Callable[[str], None]) -> None:
    found.texts.add(server.good_text())
    for number in range(len(found.replies), len(found.requests)):
        found.replies.append(reply := server.send(*found.requests[number]))
        pause = number % EVERY == EVERY - 1 or number == len(found.requests) - 1
        if pause:
            say(f"{number + 1} of {len(found.requests)} requests sent, {dict(found.statuses())}")
        if (failed(reply) or pause) and is_dead(server):
            found.deaths.append(number)
            return
        if failed(reply) or pause:
            found.texts.add(server.good_text())


def is_dead(server: Server) -> bool:
    """Tell whether the engine no longer answers."""
    return server.send("GET", "/health").status != 200


def worse(trees: Record, plain: Record) -> list[str]:
    """Name what trees did and plain vLLM did not: errors of the server, deaths, other texts."""
    requests = trees.requests
    found = [f"the server died of {show(requests[n])}" for n in trees.deaths if n not in plain.deaths]
    if trees.texts != plain.texts or len(plain.texts) != 1:
        found.append(f"a good request got {trees.texts}, plain vLLM wrote {plain.texts}")
    for request, tree, want in zip(requests, trees.replies, plain.replies, strict=True):
        if tree.status != want.status:
            found.append(f"status {tree.status} instead of {want.status}: {show(request)} {tree.body[:300]!r}")
        elif tree.status == 200 and is_repeatable(request) and texts_of(tree) != texts_of(want):
            found.append(f"{texts_of(tree)} instead of {texts_of(want)}: {show(request)}")
    return found


def failed(reply: Reply) -> bool:
    """Tell whether the server, not the client, is to blame."""
    return reply.status <= 0 or reply.status >= 500


def show(request: Raw) -> str:
    """Write a request in one line."""
    method, path, body, _ = request
    return f"{method} {path} {(body or b'')[:600].decode(errors='replace')}"


def is_repeatable(request: Raw) -> bool:
    """Tell whether a request gets the same text every time."""
    try:
        body = json.loads(request[2] or b"")
    except ValueError:
        return False
    seeded = isinstance(body, dict) and isinstance(body.get("seed"), int) and request[1] != "/v1/messages"  # it knows no seed
    return isinstance(body, dict) and (body.get("temperature") == 0 or seeded)


def texts_of(reply: Reply) -> list[Any]:
    """Return what a whole or streamed answer says, without ids and times."""
    whole = reply.json()
    if whole is not None:
        return _texts(whole)
    lines = [line.removeprefix(b"data: ") for line in reply.body.splitlines() if line.startswith(b"data: {")]
    pieces = [piece for line in lines for piece in _texts(json.loads(line))]
    return ["".join(str(piece) for piece in pieces if piece is not None)]


def _texts(part: Any) -> list[Any]:
    """Collect the leaves under names of text, in order."""
    if isinstance(part, list):
        return [text for item in part for text in _texts(item)]
    if not isinstance(part, dict):
        return []
    named = [part[name] for name in ("text", "content", "reasoning", "finish_reason", "prompt", "tokens") if name in part]
    leaves = [value for value in named if not isinstance(value, dict | list)]
    return leaves + [text for value in part.values() if isinstance(value, dict | list) for text in _texts(value)]

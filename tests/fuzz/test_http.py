"""Requests nobody should send, against a real server: refused as plain vLLM refuses them, and nobody else notices.

`make test-full` runs all of this against plain vLLM, too: what is expected here is what it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fuzz.bodies import malformed
from tests.fuzz.compare import failed, show
from tests.fuzz.schema import draw_requests
from tests.fuzz.server import GOOD, PATIENCE, Server, models, serving

FAILS_IN_VLLM = {
    "/v1/completions: grammar: regex of a bomb": 500,
    "/v1/completions: grammar: json that refers to itself": 500,
    "/v1/completions: grammar: only tokens that are not allowed": 500,
    "/v1/completions: grammar: only tokens that are bad words": 500,
}
"""What plain vLLM 0.32 answers with an error of its own; the request alone fails."""


@pytest.fixture(scope="module", params=["trees", pytest.param("plain", marks=pytest.mark.slow)])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(models(folder), folder, request.param == "trees") as running:
        yield running


def test_malformed_requests(server: Server) -> None:
    """Catches a request that ends the engine or changes the text of others, and an error of ours in place of a refusal."""
    before = server.good_text()
    replies = {name: server.send(*request) for name, request in malformed().items()}
    assert {name: reply.status for name, reply in replies.items() if failed(reply)} == FAILS_IN_VLLM
    assert server.good_text() == before
    refused = [name for name, reply in replies.items() if 400 <= reply.status < 500]
    assert len(refused) > len(replies) // 2


def test_requests_drawn_from_the_schema(server: Server) -> None:
    """Catches what no one thought of writing down; `make fuzz` draws more and compares every answer with plain vLLM's."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install -e .[fuzz]")
    before = server.good_text()
    requests = draw_requests(server.send("GET", "/openapi.json").json(), 2, 0)
    found = [(reply.status, show(request)) for request in requests if failed(reply := server.send(*request))]
    assert not found
    assert server.good_text() == before


def test_kill_9_of_the_engine(server: Server) -> None:
    """Catches clients left hanging, and a server that stays without its engine; last, since it ends the server."""
    (engine,) = server.children("EngineCore")
    long = GOOD | {"max_tokens": 240}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.post, "/v1/completions", **long) for _ in range(2)]
        streamed = [pool.submit(server.post, "/v1/completions", **long, stream=True) for _ in range(2)]
        while running(server) < 4:
            assert not asked[0].done()
        engine.kill()
        whole, pieces = [future.result() for future in asked], [future.result() for future in streamed]
    assert [reply.status for reply in whole] == [500, 500]
    assert all("EngineCore" in reply.json()["error"]["message"] for reply in whole)
    assert [reply.status for reply in pieces] == [200, 200]  # the text had begun
    assert all(b'"error"' in reply.body and reply.body.endswith(b"data: [DONE]\n\n") for reply in pieces)
    assert server.process.wait(PATIENCE) == 0


def running(server: Server) -> int:
    """Return how many requests the engine is busy with."""
    text = server.send("GET", "/metrics").body.decode()
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))

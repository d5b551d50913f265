"""Send malformed requests to `vllm serve` with trees, then the same to plain vLLM, and fail where trees do worse.

    python -m tests.fuzz --examples 40       bodies drawn from the server's OpenAPI page, and the set made by hand

Needs schemathesis: pip install -e .[fuzz]. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from tests.fuzz.bodies import Raw, malformed
from tests.fuzz.compare import failed, record, show, worse
from tests.fuzz.schema import draw_requests
from tests.fuzz.server import Server, models, serving


def main() -> int:
    """Run, print what was found, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--examples", type=int, default=40, help="bodies per path, sound and broken each (default: 40); 0: by hand alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    say = partial(print, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = models(folder)

        def choose(server: Server) -> list[Raw]:
            by_hand = list(malformed().values())
            if options.examples == 0:
                return by_hand
            page = server.send("GET", "/openapi.json").json()
            return by_hand + draw_requests(page, options.examples, options.seed)

        trees = record(partial(serving, folders, folder, True), choose, partial(say, "trees:"))
        plain = record(partial(serving, folders, folder, False), lambda _: trees.requests, partial(say, "plain:"))
    found = worse(trees, plain)
    for request, reply in zip(trees.requests, trees.replies, strict=True):
        if failed(reply):
            say(f"answered {reply.status}: {show(request)}")
    for line in found:
        say(f"WORSE {line}")
    counts = {"trees": trees.statuses(), "plain": plain.statuses(), "deaths": [len(trees.deaths), len(plain.deaths)]}
    say(json.dumps({"ok": not found, "requests": len(trees.requests), **counts}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

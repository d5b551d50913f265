"""Run an engine with trees under load for a while and fail if anything is wrong: text, blocks, state, memory, log.

    python -m tests.soak --minutes 15        64 clients against a K/V pool that preempts all the time
    python -m tests.soak --plain             the same load without trees: what vLLM itself does

Rounds of load end in silence, and then nothing of any request may be left. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker stays in the engine's process, where Inside sees all
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# oneDNN keeps compiled products for each number of rows it has met, up to 1,024: 250 MB that look like a leak for an hour.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

from tests.integration.harness import engine, lettered_options
from tests.soak.cases import Case, answer, draw_requests, words_of
from tests.soak.clients import MARK, Client, Tally
from tests.soak.inside import resident
from vllm_eagle import speculate
from vllm_eagle.testing import tiny_head, tiny_target

CLIENTS = (64, 64, 3, 64, 17, 64, 1, 64, 33, 64)
"""Round by round: from one to four times what runs at once."""
POOL = {
    "num_gpu_blocks_override": 12,
    "block_size": 32,
    "max_model_len": 320,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
}
"""A request may need ten blocks; sixteen run at once where there is room."""
TREES = {"depth": 5, "width": 6, "sibling": 2, "right_depth": [5, 2, 0, 3, 1], "vocab": 260}
STUCK_SECONDS = 300
"""Nobody waits that long for an answer unless the engine is stuck."""
WARM_ROUNDS = 9
"""Silences from which on memory is judged: caches of types fill in the first rounds."""
MORE_OBJECTS, MORE_BYTES = 0.05, 48 << 20
"""What may be gained after warming up: Python objects of the engine per request, and resident bytes in all."""


@dataclass(frozen=True)
class Silence:
    """What is held once every request of a round has ended."""

    requests: int
    free_blocks: int
    left: dict[str, int]
    kinds: Counter[str]
    """Python objects of the engine."""
    engine_bytes: int
    front_bytes: int


class Soak:
    """One engine, rounds of load, and the checks between them."""

    def __init__(self, engine: AsyncLLM, pool: list[Case], screen: TextIO) -> None:
        self.engine, self.pool, self.screen = engine, pool, screen
        self.tally, self.silences = Tally(), list[Silence]()
        self.began = time.perf_counter()

    async def run(self, seconds: float, rounds: int, asks: int) -> None:
        """Load the engine for `seconds` or `asks` requests, in rounds; stop at the first round with a problem."""
        self.silences.append(await self._silence())
        reporter = asyncio.create_task(self._report_every(10))
        loads = [CLIENTS[number % len(CLIENTS)] for number in range(rounds)]
        for number, clients in enumerate(loads):
            await self._load(number, clients, seconds / rounds, asks * sum(loads[: number + 1]) // sum(loads))
            if not self.tally.problems:
                await self._check()
            if self.tally.problems:
                break
        reporter.cancel()

    async def _load(self, number: int, clients: int, seconds: float, asks: int) -> None:
        until = asyncio.get_running_loop().time() + seconds
        before = preemptions()
        asking = [Client(self.engine, self.pool, 1000 * number + i, self.tally) for i in range(clients)]
        work = [asyncio.create_task(client.work(until, asks)) for client in asking]
        done, pending = await asyncio.wait(work, timeout=seconds + STUCK_SECONDS)
        self.tally.problems += [f"client failed: {task.exception()!r}" for task in done if task.exception()]
        if pending:
            self.tally.problems.append(f"{len(pending)} clients still wait after {STUCK_SECONDS} s: the engine is stuck")
        if clients >= POOL["max_num_seqs"] and preemptions() == before:
            self.tally.problems.append("no preemption in a round of many clients: this load does not test what it should")

    async def _silence(self) -> Silence:
        """Let the last aborts arrive, then look."""
        for _ in range(100):
            if all(await self.engine.collective_rpc("is_idle")):
                break
            await asyncio.sleep(0.1)
        (inside,) = await self.engine.collective_rpc("look_inside", args=(MARK,))
        gc.collect()
        held = Counter(inside["kinds"]), inside["resident"], resident()
        return Silence(self.tally.counts["asked"], inside["free_blocks"], inside["left"], *held)

    async def _check(self) -> None:
        silence, problems = await self._silence(), self.tally.problems
        self.silences.append(silence)
        if silence.free_blocks != self.silences[0].free_blocks:
            problems.append(f"{silence.free_blocks} blocks are free, {self.silences[0].free_blocks} were at the start")
        if silence.left:
            problems.append(f"ended requests are still known to {silence.left}")
        front = self.engine.output_processor  # its `parent_requests` leak in vLLM 0.32: aborting n > 1 leaves the parent
        if front.request_states or front.external_req_ids:
            problems.append("ended requests are still known to the front end")
        if not await self.engine.reset_prefix_cache():
            problems.append("the prefix cache cannot be reset: blocks are still in use")

    async def _report_every(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.say(self.line())

    def say(self, text: str) -> None:
        """Print past the log."""
        print(text, file=self.screen, flush=True)

    def line(self) -> str:
        """Say in one line how it goes."""
        counts, passed = self.tally.counts, time.perf_counter() - self.began
        hungup = counts["cancelled"] + counts["closed"] + counts["aborted"]
        return (
            f"{passed:5.0f} s  {counts['finished']} finished, {hungup} hung up, {counts['tokens']} tokens,"
            f" {preemptions()} preemptions, {len(self.tally.problems)} problems"
        )


def judge_memory(silences: list[Silence], problems: list[str]) -> dict[str, Any]:
    """Compare the last silence with the one a third of the way in, when everything has been used once."""
    warm, last = silences[min(len(silences) - 1, max(1, len(silences) // 3))], silences[-1]
    requests = max(1, last.requests - warm.requests)
    gained = last.kinds.total() - warm.kinds.total()
    figures = {
        "objects_per_request": round(gained / requests, 4),
        "engine_mb": [round(silence.engine_bytes / 2**20, 1) for silence in silences],
        "front_mb": [round(silence.front_bytes / 2**20, 1) for silence in silences],
    }
    if len(silences) < WARM_ROUNDS:
        return figures  # too short to tell growth from warming up
    if gained > MORE_OBJECTS * requests:
        most = (last.kinds - warm.kinds).most_common(8)
        problems.append(f"the engine keeps {figures['objects_per_request']} objects of every request: {most}")
    for name, grown in (("engine", last.engine_bytes - warm.engine_bytes), ("front end", last.front_bytes - warm.front_bytes)):
        if grown > MORE_BYTES:
            problems.append(f"the {name} grew by {grown / 2**20:.0f} MB over {requests} requests")
    return figures


def new_errors(text: str) -> list[str]:
    """Return the error lines of a log, without those of a kind plain decoding had for the same requests, in its own process."""
    lines = [line for line in text.splitlines() if "ERROR" in line or "Traceback" in line]
    places = [re.findall(r"\[\w+\.py:\d+\]", line) for line in lines]
    known = [place for line, place in zip(lines, places, strict=True) if "(MainProcess" in line and place]
    return [line for line, place in zip(lines, places, strict=True) if place not in known]


def metric(name: str) -> int:
    """Read one of vLLM's counters."""
    return sum(int(found.value) for found in get_metrics_snapshot() if found.name == name)


def preemptions() -> int:
    """Count all of them so far."""
    return metric("vllm:num_preemptions")


def ask_plain(target: str, count: int, seed: int) -> list[Case]:
    """Start plain decoding, draw requests and answer them."""
    plain = engine(target, **lettered_options(), max_num_seqs=3)
    return answer(plain, draw_requests(seed, count, words_of(plain)))


def start(target: str, folder: Path, pool: list[Case], trees: bool) -> AsyncLLM:
    """Start the engine under test."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": "tests.soak.inside.Inside",
        **lettered_options(),
        **POOL,
    }
    if trees:
        texts = folder / "texts.json"
        texts.write_text(json.dumps([text for case in pool for text in case.texts()]))
        head, drafter = tiny_head(folder / "head", vocab=300), {"texts": str(texts), **TREES}
        options |= speculate(
            head, tree_size=34, tree_depth=5, tree_top_k=4, drafter="vllm_eagle.testing.Half", drafter_options=drafter
        )
    return AsyncLLM.from_engine_args(AsyncEngineArgs(target, **options))


@contextlib.contextmanager
def logged(path: Path) -> Iterator[TextIO]:
    """Send what any process prints into a file; yield the screen."""
    screen = os.fdopen(os.dup(1), "w")
    with path.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    yield screen
    sys.stdout.flush()


async def soak(options: argparse.Namespace, folder: Path, screen: TextIO) -> tuple[Soak, int]:
    """Answer plainly, then load the engine; return the soak and the accepted tokens."""
    target = tiny_target(folder / "target", vocab=300, letters=True)
    print(f"asking plain decoding for {options.requests} requests", file=screen, flush=True)
    pool = ask_plain(target, options.requests, options.seed)
    gc.collect()
    under_test = start(target, folder, pool, not options.plain)
    try:
        found = Soak(under_test, pool, screen)
        await found.run(options.minutes * 60, options.rounds, options.asks)
        return found, metric("vllm:spec_decode_num_accepted_tokens")
    finally:
        under_test.shutdown()


def main() -> int:
    """Run, print the summary, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="of load (default: 15)")
    parser.add_argument("--asks", type=int, default=10**9, help="most requests in all, to end earlier (default: no limit)")
    parser.add_argument("--rounds", type=int, default=30, help="silences between (default: 30)")
    parser.add_argument("--requests", type=int, default=300, help="size of the pool of different requests (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the pool (default: 0)")
    parser.add_argument("--plain", action="store_true", help="without trees, to see what is vLLM's own")
    parser.add_argument("--log", type=Path, default=None, help="where the engine's log goes (default: a temporary file)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "log"
        with logged(log) as screen:
            found, accepted = asyncio.run(soak(options, Path(folder), screen))
        problems = found.tally.problems
        memory = judge_memory(found.silences, problems)
        if not options.plain and accepted < 0.2 * found.tally.counts["tokens"]:
            problems.append(f"only {accepted} drafted tokens were accepted: this load does not test what it should")
        problems += [f"log: {line}" for line in new_errors(log.read_text())][:5]
    for problem in problems[:10]:
        found.say(problem)
    found.say(
        json.dumps({"ok": not problems, **found.tally.counts, "preemptions": preemptions(), "accepted": accepted, **memory})
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Clients of an asynchronous engine: each asks, streams, sometimes hangs up, and compares what it got."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.integration.random_requests import describe, differences
from tests.soak.cases import Case

MARK = "soak"
"""Every request id contains it."""
KINDS = (RequestOutputKind.DELTA, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
HANGUPS = ("never", "never", "cancelled", "closed", "aborted")


@dataclass
class Tally:
    """What happened, and everything that was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass
class Received:
    """One output of a request, as far as it came."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop: int | str | None = None

    def add(self, out: Any, delta: bool) -> None:
        """Take one piece, or the whole so far."""
        ids = list(out.token_ids)
        self.ids, self.text = (self.ids + ids, self.text + out.text) if delta else (ids, out.text)
        self.finish, self.stop = out.finish_reason, out.stop_reason

    def wrong(self, want: Any, whole: bool) -> str | None:
        """Say what differs from plain decoding's output; of a request cut short only the beginning is compared."""
        ids = list(want.token_ids)
        if not whole:
            same = ids[: len(self.ids)] == self.ids and want.text.startswith(self.text)
            return None if same else f"{self.ids} {self.text!r} is no beginning of {ids} {want.text!r}"
        got = (self.ids, self.text, self.finish, self.stop)
        plain = (ids, want.text, want.finish_reason, want.stop_reason)
        return None if got == plain else f"{got} instead of {plain}"


class Client:
    """Ask for cases of a pool, one after another, until told to stop."""

    def __init__(self, engine: AsyncLLM, pool: list[Case], number: int, tally: Tally) -> None:
        self.engine, self.pool, self.number, self.tally = engine, pool, number, tally
        self.random = random.Random(number)

    async def work(self, until: float, asks: int) -> None:
        """Ask until the event loop's clock says `until` or all clients have asked `asks` times; wait for the last answer."""
        clock = asyncio.get_running_loop().time
        while clock() < until and self.tally.counts["asked"] < asks and not self.tally.problems:
            await asyncio.sleep(self.random.expovariate(10) if self.random.random() < 0.7 else self.random.random())
            await self._ask(self.random.choice(self.pool))

    async def _ask(self, case: Case) -> None:
        self.tally.counts["asked"] += 1
        name = f"{MARK}-{self.number}-{self.tally.counts['asked']}"
        params = case.request.sampling()
        params.output_kind = self.random.choice(KINDS)
        hangup = self.random.choice(HANGUPS)
        received, last = [Received() for _ in case.want.outputs], None
        stream = self.engine.generate({"prompt_token_ids": case.request.prompt}, params, name)
        async with aclosing(stream), aclosing(self._until_hangup(stream, name, hangup)) as pieces:
            async for last in pieces:
                for out in last.outputs:
                    received[out.index].add(out, params.output_kind == RequestOutputKind.DELTA)
        whole = last is not None and last.finished and all(got.finish not in (None, "abort") for got in received)
        self._compare(case, name, received, whole, last if params.output_kind != RequestOutputKind.DELTA else None)
        self.tally.counts["finished" if whole else hangup] += 1
        self.tally.counts["tokens"] += sum(len(got.ids) for got in received)
        if not whole and hangup == "never":
            self.tally.problems.append(f"{name} ended without its end: {received}; {describe(case.request)}")

    async def _until_hangup(self, stream: AsyncIterator[Any], name: str, hangup: str) -> AsyncIterator[Any]:
        """Pass outputs on; hang up after some of them, or after some time, which may fall into any phase of a request."""
        patience = self.random.expovariate(1)
        if hangup == "closed":
            pieces = self.random.choice([1, 2, 5, 15])
            async for out in stream:
                yield out
                pieces -= 1
                if pieces == 0:
                    return
        elif hangup == "cancelled":
            try:
                async with asyncio.timeout(patience):
                    async for out in stream:
                        yield out
            except TimeoutError:
                return
        else:
            task = asyncio.create_task(self._abort(name, patience)) if hangup == "aborted" else None
            async for out in stream:
                yield out
            if task is not None:
                task.cancel()

    async def _abort(self, name: str, patience: float) -> None:
        await asyncio.sleep(patience)
        await self.engine.abort(name)

    def _compare(self, case: Case, name: str, received: list[Received], whole: bool, final: Any) -> None:
        found = [wrong for got, want in zip(received, case.want.outputs, strict=True) if (wrong := got.wrong(want, whole))]
        if whole and final is not None and not found and len(final.outputs) == len(received):
            found = differences(case.want, final, trades=2)  # some thousand texts: now and then two logits tie
        if found:
            self.tally.problems.append(f"{name}: {found}; alone: {describe(case.request)}")

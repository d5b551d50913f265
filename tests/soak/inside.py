"""Look for what ended requests leave behind in the engine's process; vLLM adds this class to the worker."""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

ROOMS = ("vllm_eagle", "vllm.v1")
LAST_STEP = {"TreeRunner._draft_token_req_ids"}
"""vLLM's own list of the last step's requests, made anew in the next step."""


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Inside:
    """Name it with `worker_extension_cls`; the scheduler must live in the worker's process."""

    def is_idle(self) -> bool:
        """Tell whether engine and runner have let go of every request."""
        return not (self.model_runner.requests or _scheduler().has_requests())

    def look_inside(self, mark: str) -> dict[str, Any]:
        """Return free blocks, what still mentions requests whose ids contain `mark`, objects by kind, and bytes held."""
        _scheduler()
        gc.collect()
        things = gc.get_objects()
        left: Counter[str] = Counter()
        for thing in things:
            if str(type(thing).__module__).startswith(ROOMS):
                for name, value in attributes(thing):
                    left[f"{type(thing).__name__}.{name}"] += mentions(value, mark)
        return {
            "free_blocks": _scheduler().kv_cache_manager.block_pool.get_num_free_blocks(),
            "left": {name: count for name, count in left.items() if count and name not in LAST_STEP},
            "kinds": dict(Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in things)),
            "resident": resident(),
        }


@functools.cache
def _scheduler() -> Scheduler:
    """Find the scheduler of this process; vLLM hides what it made at start-up from the collector."""
    gc.unfreeze()
    (found,) = [thing for thing in gc.get_objects() if isinstance(thing, Scheduler)]
    return found


def attributes(thing: object) -> Iterator[tuple[str, Any]]:
    """Yield names and values of an object's own attributes, slots included."""
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and (value := getattr(thing, name, None)) is not None:
                yield name, value


def mentions(value: object, mark: str, depth: int = 3) -> int:
    """Count the strings that contain `mark` in containers within containers."""
    if isinstance(value, str):
        return mark in value
    if depth == 0:
        return 0
    if isinstance(value, Mapping):
        return sum(mentions(part, mark, depth - 1) for pair in list(value.items()) for part in pair)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return sum(mentions(part, mark, depth - 1) for part in list(value))
    return 0

"""Adaptive trees in the engine: what steps and drafts cost is measured at start-up, and told to the controller ever after."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import vllm

from vllm_eagle import __version__, envs
from vllm_eagle.control import Controller, Costs, Curve
from vllm_eagle.drafting import HeadDrafter, Known
from vllm_eagle.integration.parallel import AgreedCosts, Seen, agreed, is_first, ranks, share_costs
from vllm_eagle.integration.step import Step

if TYPE_CHECKING:
    from vllm_eagle.integration.runner import TreeRunner

logger = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 192, 256)
"""Row counts measured at start-up; matrix products work on tiles of rows, and one row more may cost a whole tile."""
TRIES = 3
"""Measurements of each, the fastest counts: what disturbs a measurement makes it longer."""
SAME = 1.5
"""How far two passes may be from the kept curve, one against the other, before all is measured again."""
LATE = 512
"""Positions a request's head may be behind before it has to read them, drafting or not."""


class Pace:
    """Ask the controller whether to draft, and tell it what came of it; one for each engine."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._began = time.perf_counter()
        self._ended, self._served = self._began, frozenset[str]()
        self._waited, self._read = True, False

    def take(self, seen: Seen) -> None:
        """Learn what the first of several ranks saw in the last step."""
        if isinstance(costs := self.controller.costs, AgreedCosts):
            costs.take(seen)

    def leave(self) -> Seen:
        """Return what this rank saw, if others have to learn it."""
        costs = self.controller.costs
        return costs.leave() if isinstance(costs, AgreedCosts) else []

    def begin_step(self, requests: Iterable[str]) -> None:
        """Hear that a step of these requests begins; the time since the last one counts if it has one of that one's left.

        Else the engine may have waited for a request to come.
        """
        self._began = time.perf_counter()
        self._waited = self._served.isdisjoint(requests)
        if not self._waited:
            self.controller.costs.observe_rest(self._began - self._ended)

    def end_step(self, requests: Iterable[str]) -> None:
        """Hear that a step is over."""
        self._ended, self._served = time.perf_counter(), frozenset(requests)

    def verified(self, step: Step) -> None:
        """Take a step's time and the accepted rows of its trees; steps with prompts in them take longer and do not count."""
        assert step.walk is not None
        decodes = not _reads_prompts(step)
        if decodes:
            self.controller.costs.verify.observe(int(step.counts.sum()), time.perf_counter() - self._began)
        self.controller.verified(step.trees, step.walk.paths, decodes and not self._waited and not self._read)
        self._read = not decodes  # then the head reads, too, before the next step

    def asks_for_drafts(self, step: Step, known: Known) -> bool:
        """Decide whether trees pay in the next step."""
        drafting = sum(room > 0 for room in known.rooms)
        return self.controller.worthwhile(drafting, len(known.rooms) - drafting, len(known.positions))

    def must_read(self, step: Step, known: Known) -> bool:
        """Tell whether the head has to read what is known now, though nothing is drafted."""
        return _reads_prompts(step) or int(known.lengths.max()) > LATE


def _reads_prompts(step: Step) -> bool:
    rows = [1 if tree is None else len(tree.tokens) for tree in step.trees]
    return any(count > own for count, own in zip(step.counts.tolist(), rows, strict=True))


def measure_costs(runner: TreeRunner, drafter: HeadDrafter) -> Costs:
    """Time the target and the head at several row counts, without context: recent steps correct for that later.

    What was measured is kept in the cache folder; the next start of the same model and head on this machine takes two passes
    to see that it still holds.
    """
    most = min(runner.max_num_tokens, runner.max_num_reqs * (drafter.growth.size + 1))
    rows = [count for count in ROWS if count < most] + [most] if most <= ROWS[-1] else list(ROWS)
    target, head = partial(_target_pass, runner), partial(_head_pass, runner, drafter)
    file = envs.cache_dir() / "costs" / f"{_key(runner, drafter)}.json"
    began = time.perf_counter()
    with torch.inference_mode():
        if (found := _recall(file, rows, target)) is None:
            found = agreed((_seconds(rows, target), _seconds(rows, head)))
            if is_first():
                _remember(file, rows, *found)
    verify = Curve(rows, found[0])
    logger.info(
        "measured in %.1f s: a step of the target takes %.1f ms for 1 row, %.1f ms for 16; a level of the head %.1f ms",
        time.perf_counter() - began,
        1e3 * float(verify(1)),
        1e3 * float(verify(16)),
        1e3 * found[1][0],
    )
    return share_costs(rows, *found)


def _key(runner: TreeRunner, drafter: HeadDrafter) -> str:
    """Name all that the curves depend on: both models' shapes, how they are run, and the machine."""
    model, mode = runner.model_config, runner.compilation_config.mode
    words = drafter.candidates.tokens
    told = (
        model.hf_config.to_json_string(),
        drafter.head.config,
        drafter.growth,
        None if words is None else len(words),
        (model.dtype, model.quantization, mode, torch.get_num_threads(), ranks()),
        (platform.node(), platform.processor(), vllm.__version__, __version__),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _recall(file: Path, rows: Sequence[int], target: Callable[[int], object]) -> tuple[list[float], list[float]] | None:
    """Return the curves kept in `file` if two passes of the target lie on one of them, however fast the machine is today."""
    if (kept := agreed(_read(file, rows))) is None:
        return None
    ends = [0, len(rows) - 1]
    few, many = (now / kept[0][at] for at, now in zip(ends, _seconds([rows[at] for at in ends], target), strict=True))
    return kept if agreed(max(few, many) < SAME * min(few, many)) else None


def _read(file: Path, rows: Sequence[int]) -> tuple[list[float], list[float]] | None:
    try:
        kept = json.loads(file.read_text())
        verify, level = list(map(float, kept["verify"])), list(map(float, kept["level"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if kept.get("rows") != list(rows) or not len(verify) == len(level) == len(rows) or min(*verify, *level) <= 0:
        return None
    return verify, level


def _remember(file: Path, rows: Sequence[int], verify: Sequence[float], level: Sequence[float]) -> None:
    """Keep the curves; a folder that cannot be written to costs the next start some seconds, nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"rows": list(rows), "verify": verify, "level": level}))
        scratch.replace(file)
    except OSError:
        logger.info("what steps cost is not kept: %s cannot be written", file.parent)


def _seconds(rows: Sequence[int], run: Callable[[int], object]) -> list[float]:
    found = [math.inf] * len(rows)
    for _ in range(TRIES):  # all counts in turn: a neighbour that takes the machine for a moment spoils no count's every try
        for at, count in enumerate(rows):
            began = time.perf_counter()
            run(count)
            found[at] = min(found[at], time.perf_counter() - began)
    return found


def _target_pass(runner: TreeRunner, rows: int) -> None:
    hidden, _ = runner._dummy_run(rows)
    runner.model.compute_logits(hidden[:rows]).argmax(-1)


def _head_pass(runner: TreeRunner, drafter: HeadDrafter, rows: int) -> None:
    config = drafter.head.config
    tokens = torch.zeros(rows, dtype=torch.long)
    features = torch.zeros(rows, config.hidden_size, dtype=runner.dtype)
    predicted = drafter.head(drafter.embed(tokens), features, tokens, lambda layer, query, key, value: query)
    drafter.candidates(predicted, drafter.growth.top_k)

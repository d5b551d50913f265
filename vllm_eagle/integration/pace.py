"""Adaptive trees in the engine: what steps and drafts cost is measured at start-up, and told to the controller ever after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_eagle.control import Controller, Costs, Curve
from vllm_eagle.drafting import HeadDrafter, Known
from vllm_eagle.integration.step import Step

if TYPE_CHECKING:
    from vllm_eagle.integration.runner import TreeRunner

logger = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts measured at start-up."""
TRIES = 3
"""Measurements of each, the fastest counts: what disturbs a measurement makes it longer."""
LATE = 512
"""Positions a request's head may be behind before it has to read them, drafting or not."""


class Pace:
    """Ask the controller whether to draft, and tell it what came of it; one for each engine."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._began = time.perf_counter()
        self._ended: float | None = None

    def begin_step(self) -> None:
        """Hear that a step begins."""
        self._began = time.perf_counter()
        if self._ended is not None:
            self.controller.costs.observe_rest(self._began - self._ended)

    def end_step(self) -> None:
        """Hear that a step is over."""
        self._ended = time.perf_counter()

    def verified(self, step: Step) -> None:
        """Take a step's time and the accepted rows of its trees; steps with prompts in them take longer and do not count."""
        assert step.walk is not None
        if not _reads_prompts(step):
            self.controller.costs.verify.observe(int(step.counts.sum()), time.perf_counter() - self._began)
        self.controller.verified(step.trees, step.walk.paths)

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
    """Time the target and the head at several row counts, without context: recent steps correct for that later."""
    most = min(runner.max_num_tokens, runner.max_num_reqs * (drafter.growth.size + 1))
    rows = [count for count in ROWS if count < most] + [most] if most <= ROWS[-1] else list(ROWS)
    began = time.perf_counter()
    with torch.inference_mode():
        verify = Curve(rows, _seconds(rows, lambda count: _target_pass(runner, count)))
        level = _seconds(rows, lambda count: _head_pass(runner, drafter, count))
    logger.info(
        "measured in %.1f s: a step of the target takes %.1f ms for 1 row, %.1f ms for 16; a level of the head %.1f ms",
        time.perf_counter() - began,
        1e3 * float(verify(1)),
        1e3 * float(verify(16)),
        1e3 * level[0],
    )
    return Costs(verify, Curve(rows, level), Curve(rows, level))


def _seconds(rows: Sequence[int], run: Callable[[int], object]) -> list[float]:
    found = []
    for count in rows:
        tries = []
        for _ in range(TRIES):
            began = time.perf_counter()
            run(count)
            tries.append(time.perf_counter() - began)
        found.append(min(tries))
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

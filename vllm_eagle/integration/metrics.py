"""Numbers of trees for Prometheus and for the log; `docs/metrics.md` says what each one means.

scheduler   TreeStats of a step, inside vLLM's SchedulerStats
front end   TreeProm: vLLM's counters, and ours beside them; TreeLog: one line instead of a number for every configured node
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

from vllm_eagle.integration.measures import PARTS, Measures
from vllm_eagle.tree import MAX_NODES

logger = logging.getLogger(__name__)

PREFIX = "vllm:spec_decode_tree_"
NODES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, MAX_NODES)
TOKENS = (0.5, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, MAX_NODES)
"""The first bucket holds the zeros; Ray refuses a boundary of 0."""
SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass
class TreeStats(SpecDecodingStats):
    """Add a step's trees to vLLM's counts; every field has a default, since those of other methods are decoded as this type."""

    drafted: list[int] = field(default_factory=list)
    """Nodes of each tree grown."""
    verified: list[int] = field(default_factory=list)
    """Nodes of each tree verified."""
    accepted: list[int] = field(default_factory=list)
    """Nodes accepted of each tree verified."""
    discarded: int = 0
    """Tokens behind the end of their request."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the step's parts, those that took place."""

    def observe_tree(self, nodes: int, accepted: int, depth: int) -> None:
        """Count a verified tree; positions are depths, where vLLM's `observe_draft` would count siblings as positions."""
        self.num_drafts += 1
        self.num_draft_tokens += nodes
        self.num_accepted_tokens += accepted
        for counts, reached in ((self.num_draft_tokens_per_pos, depth), (self.num_accepted_tokens_per_pos, accepted)):
            for position in range(reached):
                counts[position] += 1
        self.verified.append(nodes)
        self.accepted.append(accepted)

    def observe_step(self, measures: Measures, discarded: int) -> None:
        """Add what the runner measured."""
        self.drafted = measures.drafted
        self.seconds = measures.seconds
        self.discarded = discarded


class TreeProm:
    """Record vLLM's metrics and ours."""

    def __init__(self, usual: SpecDecodingProm, owner: Any, labels: Sequence[str] = ("model_name", "engine")) -> None:
        """`owner` is vLLM's `PrometheusStatLogger`, whose classes of metrics are used: Ray has its own."""
        self._usual = usual
        engines, names = owner.per_engine_labelvalues, list(labels)

        def histogram(name: str, text: str, buckets: Sequence[float], *more: str) -> Any:
            return owner._histogram_cls(
                name=PREFIX + name, documentation=text, labelnames=[*names, *more], buckets=list(buckets)
            )

        sizes = {
            "drafted": histogram("drafted_nodes", "Nodes of each tree drafted.", NODES),
            "verified": histogram("verified_nodes", "Nodes of each tree verified.", NODES),
            "accepted": histogram("accepted_tokens", "Nodes accepted of each tree verified.", TOKENS),
        }
        self._sizes = {name: create_metric_per_engine(metric, engines) for name, metric in sizes.items()}
        seconds = histogram("time_seconds", "Wall time of each part of a step: draft, verify, commit.", SECONDS, "part")
        self._seconds = {engine: {part: seconds.labels(*values, part) for part in PARTS} for engine, values in engines.items()}
        text = "Tokens emitted behind the end of their request."
        discarded = owner._counter_cls(name=PREFIX + "discarded_tokens", documentation=text, labelnames=names)
        self._discarded = create_metric_per_engine(discarded, engines)

    def observe(self, spec_decoding_stats: TreeStats, engine_idx: int = 0) -> None:
        """Record a step."""
        self._usual.observe(spec_decoding_stats, engine_idx)
        for name, metrics in self._sizes.items():
            for nodes in getattr(spec_decoding_stats, name):
                metrics[engine_idx].observe(nodes)
        for part, seconds in spec_decoding_stats.seconds.items():
            self._seconds[engine_idx][part].observe(seconds)
        self._discarded[engine_idx].inc(spec_decoding_stats.discarded)


class TreeLog(SpecDecodingLogging):
    """Write one line per interval: vLLM's has a rate for every configured token, which for a tree are nodes, not depths."""

    def __init__(self, depth: int) -> None:
        """`depth`: levels of the configured tree."""
        self._depth = depth
        super().__init__()

    def reset(self) -> None:
        """Start an interval."""
        self._steps: list[TreeStats] = []
        self._since = time.monotonic()

    def observe(self, spec_decoding_stats: TreeStats) -> None:
        """Take a step."""
        self._steps.append(spec_decoding_stats)

    def log(self, log_fn: Callable[..., None] = logger.info) -> None:
        """Write the line of the interval, if a tree was verified in it."""
        if any(step.num_drafts for step in self._steps):
            log_fn("SpecDecoding metrics: %s", ", ".join(self._parts(time.monotonic() - self._since)))
        self.reset()

    def _parts(self, elapsed: float) -> Iterator[str]:
        trees, accepted = (sum(getattr(step, f"num_{name}") for step in self._steps) for name in ("drafts", "accepted_tokens"))
        yield f"Mean acceptance length: {1 + accepted / trees:.2f}"
        yield f"Accepted throughput: {accepted / max(elapsed, 1e-9):.2f} tokens/s"
        drafted, verified = (mean(n for step in self._steps for n in getattr(step, f)) for f in ("drafted", "verified"))
        yield f"Nodes per tree: {drafted:.1f} drafted and {verified:.1f} verified"
        yield f"Acceptance rate by depth: {' '.join(f'{rate:.3f}' for rate in self._rates(trees))}"
        times = {part: mean(step.seconds[part] for step in self._steps if part in step.seconds) for part in PARTS}
        yield f"Time per step: {' '.join(f'{part} {1000 * seconds:.1f} ms' for part, seconds in times.items())}"

    def _rates(self, trees: int) -> list[float]:
        """Return the share of trees accepted down to each depth, as deep as trees are configured or were accepted."""
        counts = [sum(column) for column in zip(*(step.num_accepted_tokens_per_pos for step in self._steps), strict=True)]
        deepest = max((depth for depth, count in enumerate(counts, 1) if count), default=0)
        return [count / trees for count in counts[: max(self._depth, deepest)]]


def mean(values: Iterator[float]) -> float:
    """Return the mean, 0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0

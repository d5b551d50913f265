"""Numbers of trees: in Prometheus, in the log and per request they are what really happened, and plain engines have none."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

from tests.integration.harness import Verified, counters, drafting, engine, greedy, prompts, runner_of, since, traced
from vllm_eagle import speculate
from vllm_eagle.drafting import HeadCache, Known
from vllm_eagle.integration import metrics
from vllm_eagle.integration.measures import Measures
from vllm_eagle.integration.metrics import TreeLog, TreeStats
from vllm_eagle.integration.patches import StatsOfTrees
from vllm_eagle.testing import Half
from vllm_eagle.tree import DraftTree

PREFIX = "vllm:spec_decode_tree_"
SIZE, DEPTH = 12, 4
LENGTHS = [33, 5, 110, 20, 64, 7]
TOKENS = 31
LIMIT = 138
"""Of the third prompt's text, which ends there with a tree in hand."""


def configure(target: str, **options: Any) -> Any:
    return EngineArgs(model=target, dtype="float32", max_model_len=512, **options).create_engine_config()


def registered() -> set[str]:
    return {metric.name for metric in REGISTRY.collect() if metric.name.startswith(PREFIX)}


def test_other_engines_keep_their_numbers(target: str, head: str) -> None:
    """Catches metrics of trees, or our log line, where no tree is configured; and a second engine that registers them again."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    trees = configure(target, **speculate(head, tree_size=SIZE, tree_depth=DEPTH))
    for _ in range(2):
        assert PrometheusStatLogger(trees).spec_decoding_prom.__class__.__name__ == "TreeProm"
        assert len(registered()) == 5
    for config in (configure(target), configure(target, speculative_config=ngram)):
        assert type(PrometheusStatLogger(config).spec_decoding_prom) is SpecDecodingProm
        assert registered() == set()
        assert type(LoggingStatLogger(config).spec_decoding_logging) is SpecDecodingLogging
    assert isinstance(LoggingStatLogger(trees).spec_decoding_logging, TreeLog)


def test_ray_exports_them(target: str, head: str) -> None:
    """Catches a metric Ray refuses, a boundary of 0 for one: an engine of a replica would not start."""
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    logger = RayPrometheusStatLogger(configure(target, **speculate(head, tree_size=SIZE, tree_depth=DEPTH)))
    stats = TreeStats.new(SIZE)
    stats.observe_tree(nodes=SIZE, accepted=0, depth=DEPTH)
    logger.spec_decoding_prom.observe(stats)


def test_statistics_cross_processes() -> None:
    """Catches sizes and times lost on the way to the front end, and statistics of other methods that no longer arrive."""
    StatsOfTrees.apply()
    tree = TreeStats.new(SIZE)
    tree.observe_tree(nodes=11, accepted=2, depth=4)
    tree.observe_step(Measures([11, 12], {"a": 4}, {"draft": 0.25}), discarded=3)
    other = SpecDecodingStats.new(3)
    other.observe_draft(3, 1)
    for sent in (tree, other):
        sent_outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=sent))
        got = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent_outputs)).scheduler_stats
        assert vars(got.spec_decoding_stats) | vars(sent) == vars(got.spec_decoding_stats)
    assert tree.num_draft_tokens_per_pos == [1, 1, 1, 1] + [0] * 8  # by depth: 11 nodes are no 11 positions


def test_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line with a rate for each of 25 nodes, and means over steps in which a part did not take place."""
    clock = iter([100.0, 110.0, 110.0, 120.0, 120.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    log = TreeLog(depth=4)
    for trees, measures in (
        ([], Measures([12], {}, {"draft": 0.009})),  # a prompt
        ([(12, 2, 4), (6, 0, 3)], Measures([12, 12], {}, {"draft": 0.001, "verify": 0.004, "commit": 0.0005})),
        ([(9, 3, 4)], Measures([4], {}, {"draft": 0.002, "verify": 0.006, "commit": 0.0005})),
    ):
        step = TreeStats.new(25)
        for tree in trees:
            step.observe_tree(*tree)
        step.observe_step(measures, discarded=0)
        log.observe(step)
    log.log(lambda text, *values: lines.append(text % values))
    log.log(lambda text, *values: lines.append(text % values))  # nothing since
    assert lines == [
        "SpecDecoding metrics: Mean acceptance length: 2.67, Accepted throughput: 0.50 tokens/s,"
        " Nodes per tree: 10.0 drafted and 9.0 verified, Acceptance rate by depth: 0.667 0.667 0.333 0.000,"
        " Time per step: draft 4.0 ms verify 5.0 ms commit 0.5 ms"
    ]


class Counted(Half):
    """Count the nodes of each tree handed out."""

    def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
        trees = super().draft(known, cache)
        self.sizes = [*getattr(self, "sizes", []), *(tree.size for tree in trees if tree.size)]
        return trees


ASKED = prompts(LENGTHS)
ASKED.append([9])  # joins late with one new token: vLLM pads it


@pytest.fixture(scope="module")
def written(target: str) -> list[list[int]]:
    """What plain decoding returns, and nine tokens more where there is room."""
    llm = engine(target, max_model_len=LIMIT)
    outs = llm.generate([{"prompt_token_ids": p} for p in ASKED], greedy(TOKENS + 9), use_tqdm=False)
    assert not any(metric.name.startswith(PREFIX) for metric in llm.get_metrics())
    return [list(out.outputs[0].token_ids) for out in outs]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def tree(target: str, head: str, written: list[list[int]], lines: list[str]) -> Iterator[LLM]:
    """Start trees where every cut happens, with statistics per request and a log."""
    log = logging.getLogger("vllm.v1.metrics.loggers")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    llm = engine(
        target,
        **speculate(head, tree_size=SIZE, tree_depth=DEPTH, tree_top_k=3),
        max_model_len=LIMIT,
        max_num_batched_tokens=40,
        max_num_seqs=4,
        enable_prefix_caching=True,
        per_request_spec_decode_metrics="detailed",
    )
    llm.llm_engine._last_log_time = time.time() + 1e6  # no line but the one asked for
    yield llm
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)


def histogram(llm: LLM, name: str, **labels: str) -> Any:
    (found,) = [m for m in llm.get_metrics() if m.name == PREFIX + name and labels.items() <= m.labels.items()]
    return found


def observed(llm: LLM) -> dict[str, tuple[int, float]]:
    """Return count and sum of each histogram of ours."""
    found = [m for m in llm.get_metrics() if m.name.startswith(PREFIX) and hasattr(m, "buckets")]
    return {m.name.removeprefix(PREFIX) + m.labels.get("part", ""): (m.count, m.sum) for m in found}


def test_80_counts_equal_a_hand_count(
    tree: LLM, written: list[list[int]], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches draft counts rebuilt from the configured size, padding counted, siblings counted as depths (scenario 80).

    Trees have 11 nodes on 4 levels where 12 are configured; token budget, length limit and ends of requests cut them.
    """
    growth = runner_of(tree).drafter.growth
    texts = [prompt + out for prompt, out in zip(ASKED, written, strict=True)]  # trees reach beyond the end
    double = Counted(None, growth, texts=texts, depth=DEPTH, width=2, sibling=1, right_depth=[4, 2, 0, 3])
    before, ours = counters(tree), observed(tree)
    manager, by_step = tree.llm_engine.logger_manager, []
    record = manager.record
    monkeypatch.setattr(manager, "record", lambda **stats: by_step.append(stats["scheduler_stats"]) or record(**stats))
    with drafting(tree, double), traced(tree) as trace:
        outs = tree.generate([{"prompt_token_ids": p} for p in ASKED], greedy(TOKENS), use_tqdm=False)
    seen, ours = since(before, counters(tree)), {n: (c - ours[n][0], s - ours[n][1]) for n, (c, s) in observed(tree).items()}
    assert [list(out.outputs[0].token_ids) for out in outs] == [out[:TOKENS] for out in written]

    steps = [step for step in trace if step.nodes and step.emitted]
    padded = [step for step in steps if step.nodes[0] == -1]
    verified = [0 if step.nodes[0] == -1 else len(step.nodes) for step in steps]
    accepted = [len(step.emitted) - 1 for step in steps]
    assert padded and {len(step.nodes) for step in padded} == {SIZE}
    assert min(verified) == 0 and max(verified) == 11 and len(set(verified)) > 4  # cut here and there
    assert len(double.sizes) > len(steps) - len(padded)  # some were never verified
    assert set(double.sizes) > {11}  # near the length limit

    assert seen["drafts"] == len(steps)
    assert seen["draft_tokens"] == sum(verified)
    assert seen["accepted_tokens"] == sum(accepted)
    assert seen["accepted_tokens_per_pos"] == [sum(a > d for a in accepted) for d in range(SIZE)]
    levels = [(nodes + 3) // 3 if nodes else 0 for nodes in verified]  # 2 nodes at depth 1, 3 at each depth below
    found = [stats.spec_decoding_stats.num_draft_tokens_per_pos for stats in by_step if stats.spec_decoding_stats]
    assert [sum(column) for column in zip(*found, strict=True)] == [sum(level > d for level in levels) for d in range(SIZE)]
    assert ours["drafted_nodes"] == (len(double.sizes), sum(double.sizes))
    assert ours["verified_nodes"] == (len(steps), sum(verified))
    assert ours["accepted_tokens"] == (len(steps), sum(accepted))
    check_by_request(outs, trace)
    check_identity(tree, outs, trace)

    forward = ours["time_secondsverify"][0]
    assert forward == ours["time_secondscommit"][0] < ours["time_secondsdraft"][0]  # the first steps have no tree
    assert all(seconds > 0 for name, (_, seconds) in ours.items() if name.startswith("time"))
    tree.llm_engine.do_log_stats()
    (line,) = [line for line in lines if "SpecDecoding" in line]
    assert f"Mean acceptance length: {1 + sum(accepted) / len(steps):.2f}, " in line
    assert f"{sum(double.sizes) / len(double.sizes):.1f} drafted and {sum(verified) / len(steps):.1f} verified" in line


def check_by_request(outs: list[Any], trace: list[Verified]) -> None:
    """Compare vLLM's own statistics of each request with the trace."""
    by_request: dict[str, list[Verified]] = {}
    for step in trace:
        if step.nodes and step.emitted:
            by_request.setdefault(step.request.split("-")[0], []).append(step)
    for out in outs:
        mine, found = by_request[out.request_id], out.outputs[0].spec_decode_metrics
        assert found.per_step_accepted == [len(step.emitted) - 1 for step in mine]
        assert found.per_step_drafted == [0 if step.nodes[0] == -1 else len(step.nodes) for step in mine]


def check_identity(llm: LLM, outs: list[Any], trace: list[Verified]) -> None:
    """Compare with the tokens that were returned; `llm` has answered nothing else."""
    (discarded,) = [m.value for m in llm.get_metrics() if m.name == PREFIX + "discarded_tokens"]
    counted = counters(llm)
    alone = sum(len(step.emitted) for step in trace if not step.nodes)
    returned = sum(len(out.outputs[0].token_ids) for out in outs)
    assert counted["accepted_tokens"] + counted["drafts"] + alone - discarded == returned
    assert discarded > 0

"""Trees that follow the load: ids stay, the head rests in steps without drafts, and catches up before it drafts again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tests.integration.harness import cached, counters, engine, generate, greedy, prompts, runner_of, since, watching
from vllm_eagle import speculate
from vllm_eagle.integration import pace
from vllm_eagle.testing import tiny_head

LENGTHS = [5, 70, 33, 18, 9]
TOKENS = 40


@pytest.fixture(scope="module")
def base(folders: tuple[str, str]) -> LLM:
    return engine(folders[0])


@pytest.fixture(scope="module")
def auto(base: LLM, folders: tuple[str, str]) -> LLM:
    return engine(folders[0], max_num_batched_tokens=64, **speculate(folders[1], tree_size="auto", tree_depth=4, tree_top_k=3))


def script(llm: LLM, monkeypatch: pytest.MonkeyPatch, decide: Any) -> None:
    """Let `decide(call)` say whether a step drafts, and keep every node."""
    controller = runner_of(llm)._pace.controller
    calls = iter(range(10**6))
    monkeypatch.setattr(controller, "worthwhile", lambda *args: decide(next(calls)))
    monkeypatch.setattr(controller, "deeper", lambda *args: True)
    monkeypatch.setattr(controller, "choose", lambda values, depths, others: [values.shape[1]] * len(values))


def test_ids_stay(base: LLM, auto: LLM) -> None:
    """Catches a tree cut, skipped or postponed in a way that reaches the text; prompts come in chunks."""
    asked = prompts(LENGTHS)
    sampled = [SamplingParams(temperature=0.8 * (r % 2), seed=r, max_tokens=TOKENS, ignore_eos=True) for r in range(len(asked))]
    for params in ([greedy(TOKENS)] * len(asked), sampled):
        assert generate(auto, asked, params) == generate(base, asked, params)


@pytest.mark.parametrize("late", [pace.LATE, 3])
def test_drafting_on_and_off(base: LLM, auto: LLM, monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """Catches drafts made of stale features after steps without, and a pass of the head in those steps."""
    asked = prompts(LENGTHS)
    monkeypatch.setattr(pace, "LATE", late)
    script(auto, monkeypatch, lambda call: call % 7 == 6)
    passes: list[bool] = []
    with watching(auto, lambda known, trees: passes.append(any(tree.size for tree in trees))):
        before = counters(auto)
        got = generate(auto, asked, greedy(TOKENS))
    assert got == generate(base, asked, greedy(TOKENS))
    assert since(before, counters(auto))["drafts"] > 5
    assert len(passes) < 30  # of more than 40 steps; those that read prompts, or fell behind, are among them
    assert 0 < sum(passes) < len(passes)


def test_an_idle_engine_is_not_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the wait for a next request taken for the time between two steps, which makes every step look dear."""
    now, rests = [0.0], list[float]()
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    told = pace.Pace(SimpleNamespace(costs=SimpleNamespace(observe_rest=rests.append)))  # type: ignore[arg-type]
    for gap, batch in ((600.0, ["a"]), (0.25, ["a"]), (0.5, ["a", "b"]), (0.75, ["b"]), (600.0, ["c"]), (0.125, ["c"])):
        now[0] += gap
        told.begin_step(batch)
        now[0] += 1.0
        told.end_step(batch)
    assert rests == [0.25, 0.5, 0.75, 0.125]


def test_which_steps_are_held_against_the_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step in which a prompt is read, by the target or behind it by the head, or a wait, taken for a slow one."""
    steady: list[bool] = []
    costs = SimpleNamespace(observe_rest=lambda seconds: None, verify=SimpleNamespace(observe=lambda rows, seconds: None))
    controller = SimpleNamespace(costs=costs, verified=lambda trees, paths, steady_now: steady.append(steady_now))
    told = pace.Pace(controller)  # type: ignore[arg-type]
    walk = SimpleNamespace(paths=[])
    for batch, tokens in ((["a"], 20), (["a"], 1), (["a"], 1), (["a", "b"], 9), (["b"], 1), (["b"], 1), (["c"], 1), (["c"], 1)):
        told.begin_step(batch)
        told.verified(SimpleNamespace(trees=[None], counts=np.array([tokens]), walk=walk))  # type: ignore[arg-type]
        told.end_step(batch)
    assert steady == [False, False, True, False, False, True, False, True]


def test_the_head_catches_up(auto: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches holes in the head's K/V where steps were done without it."""
    found = []
    for every in (5, 1):
        script(auto, monkeypatch, lambda call, every=every: call % every == every - 1)  # type: ignore[misc]
        auto.llm_engine.add_request("x", {"prompt_token_ids": prompts(LENGTHS)[1]}, greedy(TOKENS))
        while True:
            auto.llm_engine.step()
            (request,) = runner_of(auto).requests
            batch = runner_of(auto).input_batch
            count = int(batch.num_tokens_no_spec[batch.req_id_to_index[request]])
            if count >= LENGTHS[1] + 12 and not len(runner_of(auto)._backlog):
                break
        found.append(cached(auto, request, LENGTHS[1] + 11))
        auto.llm_engine.abort_request(["x"])
        generate(auto, [[5]], greedy(1))
    heads = [name for name in found[0] if name.startswith("eagle_head")]
    assert heads
    for name in heads:
        for got, wanted in zip(found[0][name], found[1][name], strict=True):
            assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1)


def test_costs_are_measured(auto: LLM) -> None:
    """Catches a controller that decides on numbers nobody measured."""
    costs = runner_of(auto)._pace.controller.costs
    assert 0 < float(costs.verify(1)) <= float(costs.verify(64))
    assert 0 < float(costs.level(1)) <= float(costs.level(64))
    assert costs.rest > 0
    assert len(costs.verify._speeds) > 10  # steps corrected it


def test_a_useless_head_is_given_up(target: str, tmp_path: Path) -> None:
    """Catches drafts, and rows of the target, spent on a head that is never right (scenario 40)."""
    llm = engine(target, **speculate(tiny_head(tmp_path / "head"), tree_size="auto"))
    generate(llm, prompts(LENGTHS), greedy(150))
    before = counters(llm)
    generate(llm, prompts(LENGTHS), greedy(300))
    spent = since(before, counters(llm))
    assert spent["drafts"] < 0.1 * 300 * len(LENGTHS)
    assert spent["draft_tokens"] < 0.5 * 300 * len(LENGTHS)  # trees of 25 nodes would be fifty times that


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    pace._remember(tmp_path / "costs" / "x.json", [1, 4, 16], [0.01, 0.02, 0.04], [0.001, 0.001, 0.002])
    return tmp_path / "costs" / "x.json"


def seen(monkeypatch: pytest.MonkeyPatch, speed: float, many: float = 1.0) -> list[int]:
    """Let passes take what is kept, `speed` times as long, the largest `many` times that; return what is run."""
    run: list[int] = []
    kept = {1: 0.01 * speed, 4: 0.02 * speed, 16: 0.04 * speed * many}
    monkeypatch.setattr(pace, "_seconds", lambda rows, target: [run.append(count) or kept[count] for count in rows])  # type: ignore[func-returns-value]
    return run


def test_costs_are_measured_once(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches seconds of every start spent on what is known, also on a machine that is slower today."""
    for speed in (1.0, 0.4, 3.0):
        run = seen(monkeypatch, speed)
        assert pace._recall(curves, [1, 4, 16], print) == ([0.01, 0.02, 0.04], [0.001, 0.001, 0.002])
        assert run == [1, 16]


def test_costs_of_another_kind_are_measured_again(curves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a curve measured beside a heavy neighbour kept for ever, and files cut short or of other rows trusted."""
    seen(monkeypatch, 1.0, many=2.0)
    assert pace._recall(curves, [1, 4, 16], print) is None
    seen(monkeypatch, 1.0)
    assert pace._recall(curves, [1, 4], print) is None
    for text in (
        "",
        "[]",
        "{}",
        curves.read_text()[:40],
        curves.read_text().replace("0.04", "-1"),
        '{"rows": [1, 4, 16], "verify": [1], "level": [1]}',
    ):
        curves.write_text(text)
        assert pace._recall(curves, [1, 4, 16], print) is None
    assert pace._recall(curves.parent / "none.json", [1, 4, 16], print) is None


def test_costs_are_kept_by_model_head_and_machine(
    auto: LLM, base: LLM, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the costs of one head, thread count or machine used for another."""
    runner = runner_of(auto)
    drafter = runner.drafter.drafter
    key = pace._key(runner, drafter)
    assert key == pace._key(runner, drafter)
    monkeypatch.setattr(pace.platform, "node", lambda: "elsewhere")
    assert key != pace._key(runner, drafter)
    monkeypatch.undo()
    monkeypatch.setattr(drafter.candidates, "tokens", list(range(7)))
    assert key != pace._key(runner, drafter)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """Catches a start that fails because its home is read-only."""
    (tmp_path / "file").write_text("")
    pace._remember(tmp_path / "file" / "costs" / "x.json", [1], [1.0], [1.0])

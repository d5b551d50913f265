"""The vLLM contestants of the benchmark, in this process: texts, counters and times of what they say.

Not n-gram: it brings llvmlite along, after which vLLM 0.32 starts no engine in the same process any more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from vllm_eagle.bench.child import Answer, Job, Outcome, Settings
from vllm_eagle.bench.contestants import parse
from vllm_eagle.bench.journal import Cell, Measurement
from vllm_eagle.bench.summary import summarise
from vllm_eagle.integration.bench_engine import options, since, start
from vllm_eagle.testing import tiny_head, tiny_target

PROMPTS = [[7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8], [30, 40, 50], [5, 6] * 20]
JOBS = {(t, c): Job(PROMPTS, 24, t, c) for t in (0.0, 1.0) for c in (1, 2)}
NAMES = ("plain", "tree:4", "chain:2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return tiny_target(folder / "target", damping=0.002), tiny_head(folder / "head", copies=True, bias=False)


def settings(name: str, models: tuple[str, str]) -> Settings:
    return Settings(name, models[0], models[1], "float32", False, 256, 2, 64 << 20)


def engine(name: str, models: tuple[str, str]) -> Answer:
    answer = start(settings(name, models))
    answer.__self__._llm.llm_engine.engine_core._finalizer.detach()  # see harness.engine
    return answer


@pytest.fixture(scope="module")
def answers(models: tuple[str, str]) -> Iterator[dict[str, dict[tuple[float, int], Outcome]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        found = {}
        for name in NAMES:
            answer = engine(name, models)
            found[name] = {case: answer(job) for case, job in JOBS.items()}
        yield found


def test_texts_are_plain_decodings(answers: dict[str, dict[tuple[float, int], Outcome]]) -> None:
    """Catches seeds or ends of text that differ between contestants, and answers that go to another request."""
    plain = answers["plain"]
    assert plain[(0.0, 1)].ids == plain[(0.0, 2)].ids != plain[(1.0, 1)].ids == plain[(1.0, 2)].ids
    assert max(map(len, plain[(0.0, 1)].ids)) == 24
    for name in NAMES[1:]:
        for (temperature, concurrency), outcome in answers[name].items():
            if temperature == 0 or name == "tree:4":
                assert outcome.ids == plain[(temperature, concurrency)].ids, (name, temperature, concurrency)


def test_counters_are_of_the_job_alone(answers: dict[str, dict[tuple[float, int], Outcome]]) -> None:
    """Catches counts of the engine's whole life, and positions taken for nodes."""
    for case, outcome in answers["plain"].items():
        assert (outcome.drafts, outcome.drafted, outcome.accepted, outcome.sizes) == (0, 0, 0, {}), case
    for name, most in (("tree:4", 4), ("chain:2", 2)):
        for (temperature, concurrency), outcome in answers[name].items():
            steps = sum(len(ids) - 1 for ids in outcome.ids)
            assert outcome.drafts <= steps, (name, temperature, concurrency)
            assert outcome.accepted <= outcome.drafted <= most * outcome.drafts
            if name == "tree:4" or temperature == 0:
                assert outcome.drafts > 0 and outcome.accepted > 0
    tree = answers["tree:4"][(0.0, 1)]
    assert set(tree.sizes) == {"4"} and tree.sizes["4"] >= tree.drafts


def test_times_add_up(answers: dict[str, dict[tuple[float, int], Outcome]]) -> None:
    """Catches a first token timed from the start of the job, and tokens after it that take no time."""
    for name in NAMES:
        alone = answers[name][(0.0, 1)]
        assert len(alone.first) == len(alone.rest) == len(PROMPTS)
        assert all(taken > 0 for taken in (*alone.first, *alone.rest))
        spent = sum(alone.first) + sum(rest * (len(ids) - 1) for rest, ids in zip(alone.rest, alone.ids, strict=True))
        assert spent <= alone.seconds, name  # one after another: nothing is counted twice


def test_a_report_comes_of_it(answers: dict[str, dict[tuple[float, int], Outcome]]) -> None:
    """Catches figures that the report cannot take."""
    cells = {case: Cell("mt", *case) for case in JOBS}
    found = [Measurement.of(cells[c], 0, name, out) for name, outs in answers.items() for c, out in outs.items()]
    for table in summarise(found, {}, NAMES, lambda concurrency: 1.0):
        rows = {row["contestant"]: row for row in table["rows"]}
        assert rows["tree:4"]["equal_texts"] == rows["tree:4"]["texts"] == 3
        assert 1 < rows["tree:4"]["accepted_length"] <= 5
        assert (rows["chain:2"]["equal_texts"] is None) == (table["temperature"] > 0)


def test_suffix_decoding_runs_or_says_what_it_needs(models: tuple[str, str]) -> None:
    """Catches a reason that does not name the package."""
    if importlib.util.find_spec("arctic_inference"):
        assert engine("suffix", models)(JOBS[(0.0, 1)]).ids
    else:
        with pytest.raises(Exception, match=r"(?i)arctic.?inference"):
            start(settings("suffix", models))


def test_options_are_the_contestants() -> None:
    """Catches a size that does not reach its engine."""
    ours = {name: options(parse(name), "head")["additional_config"]["vllm_eagle"] for name in ("auto", "tree:60", "tree:12x4")}
    assert [(o["tree_size"], o.get("tree_depth")) for o in ours.values()] == [("auto", None), (60, None), (12, 4)]
    theirs = {name: options(parse(name), "head")["speculative_config"] for name in ("chain:5", "ngram:7", "ngram")}
    assert [one["num_speculative_tokens"] for one in theirs.values()] == [5, 7, 5]
    assert theirs["chain:5"]["model"] == "head" and options(parse("plain"), None) == {}


def test_buckets_hold_their_own() -> None:
    """Catches a histogram read as if its buckets did not hold those below."""
    before = {"drafts": 3, "drafted": 9, "accepted": 2, "sizes": {"4.0": 1, "8.0": 3, "+Inf": 3}}
    after = {"drafts": 9, "drafted": 40, "accepted": 7, "sizes": {"4.0": 1, "8.0": 7, "+Inf": 9}}
    assert since(before, after) == {"drafts": 6, "drafted": 31, "accepted": 5, "sizes": {"8": 4, "+Inf": 2}}

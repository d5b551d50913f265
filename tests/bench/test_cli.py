"""The command on a tiny model, from options to report; the others are in `tests/integration/test_bench_engine.py`."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_eagle.cli import main
from vllm_eagle.testing import tiny_target

Ran = tuple[list[str], Path, str]
NAMES = ["plain", "ngram", "hf"]


def bench(options: list[str]) -> tuple[int, str]:
    """Run the command here, its contestants in processes of their own; return its status and what it printed."""
    with redirect_stdout(io.StringIO()) as printed:
        status = main(["bench", *options])
    return status, printed.getvalue()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("bench")
    target = tiny_target(folder / "target", vocab=300, letters=True)
    prompts = folder / "mt.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abcabcabcabc", "hello", "{}")))
    options = ["--model", target, "--prompts", str(prompts), "--contestants", *NAMES, "--threads", "1", "--count", "3"]
    options += ["--tokens", "12", "--rounds", "2", "--concurrency", "1", "2", "--out", str(folder / "out")]
    status, printed = bench(options)
    assert status == 0, printed[-3000:]
    return options, folder / "out", printed


def test_all_are_measured_and_equal(ran: Ran) -> None:
    """Catches a contestant that measures nothing, prompts that differ between contestants, and a batch asked of one."""
    results = json.loads(ran[2].splitlines()[-1])
    assert results["failed"] == {}
    for table, concurrency in zip(results["tables"], (1, 2), strict=True):
        assert (table["workload"], table["temperature"], table["concurrency"]) == ("mt", 0, concurrency)
        plain, ngram, hugging = table["rows"]
        assert plain["equal_texts"] == plain["texts"] == 6 and plain["ratio"]["median"] == 1
        assert ngram["equal_texts"] == 6 and ngram["ratio"]["median"] > 0
        assert plain["tokens_per_s"]["median"] > 0 and plain["first_token_ms"]["median"] > 0
        if concurrency == 1:
            assert hugging["equal_texts"] == 6 and hugging["ratio"]["median"] > 0
        else:
            assert "one request at a time" in hugging["absent"]
        assert table["plain_limit"] > 0


def test_what_is_left(ran: Ran) -> None:
    """Catches a report without its files or its provenance, and a second run that measures again."""
    options, out, printed = ran
    results = json.loads(printed.splitlines()[-1])
    assert {"measurements.jsonl", "results.json", "index.html", "logs"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "results.json").read_text()) == results
    assert results["provenance"]["threads"] == "1" and results["provenance"]["vllm"] == version("vllm")
    assert results["run"]["workloads"] == ["mt"] and results["machine"]["gemm_gflops"] > 0
    before = (out / "measurements.jsonl").read_text()
    status, printed = bench(options)
    assert status == 0 and "continuing: 10 measurements are in" in printed
    assert (out / "measurements.jsonl").read_text() == before
    assert bench([*options, "--tokens", "13"])[0] == 2  # another question, another folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contestants", "trees"], "unknown contestant 'trees'"),
        (["--model", "/nowhere", "--contestants", "tree:8"], "give --head"),
        (["--head", "/nowhere"], "--head without --model: name the target it was trained for"),
        (["--model", "/nowhere", "--contestants", "ngram"], "give the folder of a model"),
        (["--model", "/nowhere", "--head", "/nowhere"], "give the folder of an EAGLE head"),
        (["--prompts", "/nowhere.jsonl:qa"], "no prompts at /nowhere.jsonl:qa"),
        (["--contestants", "tree:8", "--floor", "0.95"], "--floor is for auto"),
    ],
)
def test_bad_input_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a mistake that ends in a traceback, or only after minutes."""
    assert main(["bench", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-eagle: ") and said in line


def test_help_names_every_contestant(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a help that does not teach."""
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("tree:N", "chain:K", "hf-lookup", "suffix", "example:", "--concurrency"))

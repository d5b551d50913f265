"""The command on a tiny model: every kind of contestant that needs no further package, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle.cli import main
from vllm_eagle.testing import tiny_head, tiny_target

NAMES = ["plain", "tree:4", "chain:2", "ngram", "hf"]


def bench(*options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "vllm_eagle.cli", "bench", *map(str, options)]
    return subprocess.run(line, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[object]]:
    folder = tmp_path_factory.mktemp("bench")
    target = tiny_target(folder / "target", vocab=300, letters=True, damping=0.002)
    head = tiny_head(folder / "head", vocab=300, copies=True, bias=False)
    prompts = folder / "mt.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abcabcabcabc", "hello", "{}")))
    options = ["--model", target, "--head", head, "--prompts", prompts, "--contestants", *NAMES, "--count", 3]
    options += ["--tokens", 12, "--rounds", 1, "--concurrency", 1, 2, "--temperatures", 0, 1, "--out", folder / "out"]
    done = bench(*options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder / "out", json.loads(done.stdout.splitlines()[-1]), options


def rows(results: dict[str, Any]) -> dict[tuple[float, int], dict[str, Any]]:
    found = results["tables"]
    return {(t["temperature"], t["concurrency"]): {row["contestant"]: row for row in t["rows"]} for t in found}


def test_all_are_measured(ran: tuple[Path, dict[str, Any], list[object]]) -> None:
    """Catches a contestant that measures nothing, or answers nothing."""
    _, results, _ = ran
    assert results["failed"] == {}
    assert list(rows(results)) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for (_, concurrency), cell in rows(results).items():
        assert list(cell) == NAMES
        for name, row in cell.items():
            if name == "hf" and concurrency == 2:
                assert "one request at a time" in row["absent"]
                continue
            assert row["tokens_per_s"]["median"] > 0 and row["first_token_ms"]["median"] > 0
            assert row["texts"] == 3
    assert all(table["plain_limit"] > 0 for table in results["tables"])


def test_texts_are_plain_decodings(ran: tuple[Path, dict[str, Any], list[object]]) -> None:
    """Catches seeds, ends of text or prompts that differ between contestants, sampled ones included."""
    _, results, _ = ran
    for (temperature, _), cell in rows(results).items():
        assert cell["plain"]["equal_texts"] == cell["tree:4"]["equal_texts"] == 3
        for name in ("chain:2", "ngram", "hf"):
            assert "absent" in cell[name] or cell[name]["equal_texts"] == (3 if temperature == 0 else None)


def test_drafts_are_counted(ran: tuple[Path, dict[str, Any], list[object]]) -> None:
    """Catches counters read before a job, of the whole life of the engine, or of another method."""
    _, results, _ = ran
    cell = rows(results)[(0, 1)]
    assert cell["plain"]["drafts"] == 0 and cell["plain"]["accepted_length"] is None
    assert 0 < cell["tree:4"]["drafts"] <= 3 * 11
    assert 0 < cell["tree:4"]["nodes"] <= 4 and 1 <= cell["tree:4"]["accepted_length"] <= 5
    assert set(cell["tree:4"]["sizes"]) == {"4"} and cell["tree:4"]["sizes"]["4"] >= cell["tree:4"]["drafts"]
    assert 0 < cell["chain:2"]["nodes"] <= 2 and cell["chain:2"]["sizes"] == {}


def test_what_is_left(ran: tuple[Path, dict[str, Any], list[object]]) -> None:
    """Catches a report without its files or its provenance, and a second run that measures again."""
    out, results, options = ran
    assert {"measurements.jsonl", "results.json", "index.html", "logs"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "results.json").read_text()) == results
    assert results["provenance"]["threads"] == "1" and results["provenance"]["commit"]
    assert results["run"]["workloads"] == ["mt"] and results["machine"]["gemm_gflops"] > 0
    before = (out / "measurements.jsonl").read_text()
    again = bench(*options)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "continuing: 18 measurements are in" in again.stdout
    assert (out / "measurements.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contestants", "trees"], "unknown contestant 'trees'"),
        (["--model", "/nowhere", "--contestants", "tree:8"], "give --head"),
        (["--head", "/nowhere"], "--head without --model: name the target it was trained for"),
        (["--model", "/nowhere", "--contestants", "ngram"], "give the folder of a model"),
        (["--model", "/nowhere", "--head", "/nowhere"], "give the folder of an EAGLE head"),
        (["--prompts", "/nowhere.jsonl:qa"], "no prompts at /nowhere.jsonl:qa"),
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

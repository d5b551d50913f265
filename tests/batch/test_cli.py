"""The whole command on a tiny model, killed and continued, against rows answered one by one with plain decoding."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle.cli import main

BAD = {
    3: ({"id": "x", "prompt": "w3", "temperatur": 1}, "unknown parameter temperatur"),
    11: ({"prompt": "w3", "temperature": -1}, "temperature"),
    12: ({"prompt": "w5 " * 400}, "256"),
    20: ({"messages": "w5"}, "objects with role and content"),
}


def rows(count: int) -> list[dict[str, Any]]:
    rng = random.Random(5)
    made: list[dict[str, Any]] = []
    for index in range(count):
        prompt = " ".join(f"w{rng.randrange(4, 200)}" for _ in range(rng.randrange(1, 30)))
        row = {"id": f"row {index}", "prompt": prompt, "max_tokens": rng.randrange(1, 25), "ignore_eos": True}
        made.append(row | ({"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "n": 1 + index % 3 // 2}))
    for index, (row, _) in BAD.items():
        made[index] = row
    return made


def flags(folders: tuple[str, str]) -> list[str]:
    target, head = folders
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--disable-log-stats"]
    return [*flags, "--model", target, "--speculative-model", head, "--speculative-tree-size", "12"]


@pytest.fixture(scope="module")
def command(folders: tuple[str, str]) -> list[str]:
    return flags(folders)


def write(path: Path, made: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(files: list[Path], command: list[str]) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "vllm_eagle.cli", "batch", *map(str, files), *command]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"})


def done_rows(part: Path) -> int:
    return part.read_bytes().count(b"\n") - 1 if part.exists() else 0


def run(made: list[dict[str, Any]], folder: Path, command: list[str], kills: int) -> list[dict[str, Any]]:
    """Kill the job at random that many times, with signal 9, then let it end."""
    files = [folder / "in.jsonl", folder / "out.jsonl"]
    write(files[0], made)
    part, rng = folder / "out.jsonl.part", random.Random(1)
    for kill in range(kills):
        process, before = start(files, command), done_rows(part)
        wanted = before + rng.randrange(1, max(2, (len(made) - before) // (kills - kill + 1)))
        while process.poll() is None and done_rows(part) < wanted:
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()[1][-2000:]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert before < done_rows(part) < len(made)
        assert not files[1].exists()
    out, err = start(files, command).communicate(timeout=900)
    assert f"{len(made)} rows in {files[1]}" in out, err[-2000:]
    return read(files[1])


def expected(made: list[dict[str, Any]], target: str) -> dict[int, list[str]]:
    from vllm import SamplingParams

    from tests.integration.harness import engine

    plain, found = engine(target, max_model_len=256), {}
    for index, row in enumerate(made):
        if index not in BAD:
            params = SamplingParams(**{key: value for key, value in row.items() if key not in ("id", "prompt")})
            (out,) = plain.generate([row["prompt"]], params, use_tqdm=False)
            found[index] = [one.text for one in out.outputs]
    return found


def check(found: list[dict[str, Any]], made: list[dict[str, Any]], texts: dict[int, list[str]]) -> None:
    assert [row["index"] for row in found] == list(range(len(made)))
    for index, row in enumerate(found):
        assert row["id"] == made[index].get("id")
        if index in BAD:
            assert BAD[index][1] in row["error"]
        else:
            assert [one["text"] for one in row["outputs"]] == texts[index]


def test_a_job_killed_and_continued(folders: tuple[str, str], command: list[str], tmp_path: Path) -> None:
    """Catches rows lost, doubled, out of order or different from plain decoding, and one bad row that ends the others."""
    made = rows(60)
    check(run(made, tmp_path, command, kills=1), made, expected(made, folders[0]))


@pytest.mark.slow
def test_two_thousand_rows_killed_five_times(folders: tuple[str, str], command: list[str], tmp_path: Path) -> None:
    """The same, at length; plain decoding answers them in one unbroken run."""
    made = rows(2000)
    check(run(made, tmp_path, command, kills=5), made, expected(made, folders[0]))


def test_a_flag_vllm_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback, and results of a job that never began."""
    monkeypatch.setattr("vllm_eagle.demo.cli.prepare_process", lambda: None)  # it may start the process again
    write(tmp_path / "in.jsonl", rows(30))
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--no-such-flag", "3"]) == 2
    assert "flags behind IN and OUT are those of vllm serve" in capsys.readouterr().err

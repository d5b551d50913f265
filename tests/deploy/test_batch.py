"""The same job on a Ray cluster: same rows, same results, and it goes on after a kill."""

from __future__ import annotations

import builtins
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.batch.test_cli import check, done_rows, expected, flags, read, rows, start, write
from vllm_eagle.batch.results import Results, fingerprint
from vllm_eagle.cli import main

RAY = ["--ray", "--ray-block", "16"]


def test_on_a_cluster(folders: tuple[str, str], tmp_path: Path) -> None:
    """Catches rows lost, doubled or out of order, one bad row that ends its block, and answered rows asked again."""
    made = rows(40)
    files = [tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
    write(files[0], made)
    kept = {"id": "row 5", "prompt_tokens": 3, "outputs": [{"text": "kept", "finish_reason": "stop", "tokens": 1}]}
    with Results(files[1], fingerprint(files[0], flags(folders))) as results:
        results.add(5, kept)
    out, err = start(files, [*RAY, *flags(folders)]).communicate(timeout=900)
    assert f"{len(made)} rows in {files[1]}" in out, err[-3000:]
    check(read(files[1]), made, expected(made, folders[0]) | {5: ["kept"]})


@pytest.mark.slow
def test_killed_and_continued(folders: tuple[str, str], tmp_path: Path) -> None:
    """Catches a block that is answered twice after a kill, with two replicas."""
    made, rng = rows(400), random.Random(3)
    files = [tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
    write(files[0], made)
    for _ in range(2):
        process, before = start(files, [*RAY, "--ray-replicas", "2", *flags(folders)]), done_rows(tmp_path / "out.jsonl.part")
        while process.poll() is None and done_rows(tmp_path / "out.jsonl.part") < before + rng.randrange(17, 100):
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()[1][-2000:]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert before < done_rows(tmp_path / "out.jsonl.part") < len(made)
    out, err = start(files, [*RAY, *flags(folders)]).communicate(timeout=900)
    assert f"{len(made)} rows in {files[1]}" in out, err[-3000:]
    check(read(files[1]), made, expected(made, folders[0]))


def test_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where the extra is missing."""
    usual = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ImportError("No module named 'ray'")
        return usual(name, *rest, **more)

    monkeypatch.setattr("vllm_eagle.demo.cli.prepare_process", lambda: None)
    monkeypatch.setattr(builtins, "__import__", without)
    write(tmp_path / "in.jsonl", rows(21))
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *RAY]) == 2
    assert "pip install 'vllm-eagle[ray]'" in capsys.readouterr().err

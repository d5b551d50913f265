"""The command, from a prompt to its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_eagle.cli import main
from vllm_eagle.testing import tiny_head, tiny_target


def test_a_prompt_becomes_a_page(tmp_path: Path) -> None:
    """Catches a page that stays in the temporary folder, or is one of the answer that only warmed the engine."""
    target, head = tiny_target(tmp_path / "target", damping=0.002), tiny_head(tmp_path / "head", copies=True)
    out = tmp_path / "page.html"
    command = [sys.executable, "-m", "vllm_eagle.cli", "trace", "5 6 7", "--model", target, "--head", head]
    done = subprocess.run(
        [*command, "--tokens", "24", "--tree-size", "9", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"open {out} in a browser" in done.stdout
    page = out.read_text()
    assert page.count('"verify_ms"') >= 5
    assert '"head": "head"' in page


def test_a_place_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an answer that is written for half a minute and then has nowhere to go."""
    assert main(["trace", "Hello", "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err

"""The demo on a tiny model: both contestants, the table, the exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from vllm_eagle.testing import tiny_head, tiny_target


def test_demo_ends_with_its_table(tmp_path: Path) -> None:
    """Catches a demo that breaks on the way to its table, or differs in one text."""
    target = tiny_target(tmp_path / "target", damping=0.002)
    head = tiny_head(tmp_path / "head", copies=True)
    command = [
        sys.executable,
        "-m",
        "vllm_eagle.cli",
        "demo",
        "--model",
        target,
        "--head",
        head,
        tiny_head(tmp_path / "weak"),
        "--prompts",
        "2",
        "--tokens",
        "24",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "texts identical: 2 of 2" in done.stdout
    tree, weak = re.findall(r"trees of 12 nodes, (\w+) +([\d.]+) +([\d.]+) +([\d.]+)", done.stdout)
    assert (tree[0], weak[0]) == ("head", "weak")
    assert float(tree[3]) > float(weak[3]) >= 1.0


def test_help_and_bad_input() -> None:
    """Catches a traceback for a folder that is no head."""
    command = [sys.executable, "-m", "vllm_eagle.cli"]
    assert "demo" in subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    done = subprocess.run([*command, "demo", "--model", "/nowhere", "--head", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "vllm-eagle: no config.json in /nowhere; give the folder of an EAGLE head"

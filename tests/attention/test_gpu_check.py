"""The device check, as far as it goes without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run(repository: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "benchmarks" / "gpu" / "check.py")]
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it finds the package itself
    return subprocess.run(command, capture_output=True, text=True, env={**usual, **environment}, cwd="/")


def test_right_under_the_interpreter(repository: Path) -> None:
    """Catches a check that cannot start where vLLM is not, and a speed reported from a machine without a GPU."""
    done = run(repository, TRITON_INTERPRET="1")
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and all(one["ok"] for one in result["right"]) and len(result["right"]) == 20
    assert result["cases"] == [] and result["device"] == "Triton's interpreter, on a CPU" and "copy_gb_s" not in result


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure this GPU")
def test_says_that_there_is_no_gpu(repository: Path) -> None:
    """Catches a traceback as the answer to a missing GPU."""
    done = run(repository, TRITON_INTERPRET="0")
    assert done.returncode == 2 and "no GPU here" in done.stderr and "Traceback" not in done.stderr

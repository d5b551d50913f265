"""An offline engine one of whose processes dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("contestant", ["trees", pytest.param("plain", marks=pytest.mark.slow)])
def test_kill_9_of_the_worker(repository: Path, tmp_path: Path, contestant: str) -> None:
    """Catches a caller left hanging when the process that holds the trees dies."""
    command = [sys.executable, "-m", "tests.fuzz.killed", str(tmp_path), contestant, "Worker"]
    environment: dict[str, Any] = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert "raised EngineDeadError" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]

"""The soak in its short form, as `make soak` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_soak_for_a_while(repository: Path, tmp_path: Path) -> None:
    """Catches what only churn brings out: crashes at some concurrency, leaked blocks, state kept of ended requests, text
    of one request in another (scenarios 32, 34, 58, 86)."""
    log = tmp_path / "log"
    few = ["--minutes", "30", "--asks", "360", "--rounds", "4", "--requests", "80"]
    command = [sys.executable, "-m", "tests.soak", *few, "--log", str(log)]
    done = subprocess.run(command, cwd=repository, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:] + log.read_text()[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["finished"] > 90
    assert min(figures[how] for how in ("cancelled", "closed", "aborted")) > 10
    assert figures["preemptions"] > 5

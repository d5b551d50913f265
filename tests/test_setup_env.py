"""The set-up script: what it builds to mend vLLM's CPU install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from vllm_eagle import setup_env


def test_metadata_wheel_installs_as_vllm(tmp_path: Path) -> None:
    """Catches a wheel pip refuses, or a version by which vLLM does not recognise its CPU build."""
    wheel = setup_env.metadata_wheel(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert all(".dist-info/" in name for name in names)  # metadata alone: no file of vLLM is shadowed
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True)
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    got = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(target)}, check=True
    )
    assert got.stdout.strip() == f"{setup_env.VLLM}+cpu"


def test_a_healthy_environment_is_left_alone(capfd: object) -> None:
    """Catches a repair that runs where nothing is broken: this environment was set up by it."""
    setup_env.repair(Path(sys.executable))
    out, _ = capfd.readouterr()  # type: ignore[attr-defined]
    assert out == ""

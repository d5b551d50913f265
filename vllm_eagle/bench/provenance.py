"""Where figures come from: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "torch", "transformers")


def provenance(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a run; `env` is the contestants' environment."""
    from vllm_eagle import __version__

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "commit": commit(),
        "vllm_eagle": __version__,
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": env["OMP_NUM_THREADS"],
        "memory": _first("/proc/meminfo", "MemTotal"),
        "load_before": round(os.getloadavg()[0], 2),
        "preload": " ".join(Path(part).name for part in env.get("LD_PRELOAD", "").split(":") if part),
        "block_time": env.get("KMP_BLOCKTIME", ""),
    }


def commit() -> str:
    """Return the commit of this clone, with a + if files differ from it; nothing outside a clone."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def available_memory() -> int | None:
    """Return the bytes processes may still take, None where the system does not say."""
    found = _first("/proc/meminfo", "MemAvailable")
    return None if found is None else int(found.split()[0]) * 1024


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _first(file: str, name: str) -> str | None:
    path = Path(file)
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)

"""The rules a reader relies on, checked on the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import vllm_eagle

PACKAGE = Path(vllm_eagle.__file__).parent
# A room may import the rooms below it and itself, never one above.
ORDER = [
    "errors",
    "envs",
    "names",
    "heads",
    "arguments",
    "checkpoints",
    "tree",
    "attention",
    "verify",
    "drafting",
    "control",
    "config",
    "speculate",
    "testing",
    "trace",
    "train",
    "batch",
    "bench",
    "doctor",
    "integration",
    "demo",
    "deploy",
    "plugin",
    "cli",
]


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
    return found


def test_only_integration_imports_vllm() -> None:
    """Catches a second place that breaks with the next vLLM."""
    for path in PACKAGE.rglob("*.py"):
        if "integration" not in path.relative_to(PACKAGE).parts:
            assert [at for at in imports(path) if at[1].split(".")[0] == "vllm"] == [], path


def test_no_upward_imports() -> None:
    """Catches a cycle between rooms."""
    for path in PACKAGE.rglob("*.py"):
        room = "cli" if path.name == "cli.py" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ("__init__", "setup_env"):
            continue
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] == "vllm_eagle" and len(parts) > 1:
                assert ORDER.index(parts[1]) <= ORDER.index(room), f"{path}:{line} imports {name}"


def test_public_surface() -> None:
    """Catches a name published by accident."""
    assert sorted(vllm_eagle.__all__) == ["EagleError", "HeadError", "TreeError", "speculate"]


def test_importing_costs_nothing() -> None:
    """Catches a heavy import on the way into every vLLM process: no torch, no vllm, no transformers."""
    heavy = ("torch", "vllm", "transformers", "numpy")
    code = f"import vllm_eagle, vllm_eagle.plugin, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_help_is_fast() -> None:
    """Catches a heavy import on the way to `vllm-eagle --help`."""
    heavy = ("torch", "vllm", "transformers", "numpy")
    code = f"import sys, vllm_eagle.cli; vllm_eagle.cli.build_parser(); print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"

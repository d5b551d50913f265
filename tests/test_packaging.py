"""The wheel: what a user who installs it gets, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from vllm_eagle import __version__


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in (name for name in listed if name and not name.startswith(("examples/", "tests/", "docs/"))):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((repository / name).read_bytes())
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()  # what must not get in
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile, repository: Path) -> None:
    """Catches data files that are there in a clone alone, a module left out, and tests in a user's site-packages."""
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "vllm_eagle"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert names == {name for name in listed.split("\n") if name}
    assert {"vllm_eagle/py.typed", "vllm_eagle/attention/kernel.cpp", "vllm_eagle/trace/page.html"} <= names


def test_its_metadata(wheel: zipfile.ZipFile, repository: Path) -> None:
    """Catches a version kept in two places, a licence that is not shipped, and an entry point vLLM does not find."""
    info = f"vllm_eagle-{__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"cpu", "cuda", "ray", "train", "bench", "demo"} <= set(metadata.get_all("Provides-Extra", []))
    assert wheel.read(f"{info}/licenses/LICENSE") == (repository / "LICENSE").read_bytes()
    points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "[vllm.general_plugins]\nvllm_eagle = vllm_eagle.plugin:register" in points
    assert "vllm-eagle = vllm_eagle.cli:main" in points

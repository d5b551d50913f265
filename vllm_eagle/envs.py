"""Every environment variable this package reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """Return where compiled kernels and prepared demo models are kept (`VLLM_EAGLE_CACHE`)."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_eagle"
    return Path(os.environ.get("VLLM_EAGLE_CACHE") or default)


def attention_override() -> str | None:
    """Return the tree attention forced by name (`VLLM_EAGLE_ATTENTION`: `native` or `reference`), if any."""
    return os.environ.get("VLLM_EAGLE_ATTENTION") or None


def shares_noise() -> bool:
    """Tell whether drafts are ranked with the target's own noise (`VLLM_EAGLE_SHARED_NOISE=0` turns it off, to measure)."""
    return os.environ.get("VLLM_EAGLE_SHARED_NOISE", "1") != "0"


def tries_cuda() -> bool:
    """Tell whether to start on a GPU, where trees have never been run (`VLLM_EAGLE_CUDA=1`)."""
    return os.environ.get("VLLM_EAGLE_CUDA", "0") == "1"


def compiler() -> str:
    """Return the C++ compiler for the CPU kernel (`CXX`, default `g++`)."""
    return os.environ.get("CXX") or "g++"


def preload() -> str | None:
    """Return `LD_PRELOAD` with Intel's OpenMP in front, as vLLM asks for on x86; None if it is missing or there already."""
    library, loaded = Path(sys.prefix) / "lib" / "libiomp5.so", os.environ.get("LD_PRELOAD", "")
    if not library.is_file() or "libiomp5" in loaded:
        return None
    return f"{library}:{loaded}".rstrip(":")

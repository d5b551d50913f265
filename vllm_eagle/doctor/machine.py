"""The machine: instruction set, cores and threads, what is preloaded, memory, and who else is at work."""

from __future__ import annotations

import ctypes.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from vllm_eagle.bench.provenance import available_memory
from vllm_eagle.doctor.finding import Finding, bad, good, note
from vllm_eagle.envs import preload

GIB = 1 << 30
ENGINE = int(1.5 * GIB)
"""What an engine takes beside weights and cache, roughly: libraries, buffers, tokenizer, front end."""


def look() -> Iterator[Finding]:
    """Yield what is found about this machine as it is now."""
    yield _instructions()
    yield from _threads()
    yield from _libraries()
    yield _load()


def _instructions() -> Finding:
    flags = _flags()
    if platform.machine() != "x86_64":
        return note(
            f"{platform.machine()}: trees were only run on x86-64", "compare the texts with plain decoding first: make demo"
        )
    wide = "avx512f" in flags
    if not wide and "avx2" not in flags:
        return bad("this processor has neither AVX-512 nor AVX2", "vLLM's CPU build needs one of them")
    has = ["AVX-512" if wide else "AVX2"]
    has += [word for flag, word in (("avx512_vnni", "8-bit products"), ("amx_tile", "AMX")) if flag in flags]
    halves = {"avx512_bf16", "amx_bf16"} & flags
    text = f"{', '.join(has)}; {'bf16 arithmetic' if halves else 'no bf16 arithmetic'}"
    return good(text) if halves else note(text, "serve with --dtype float32: bf16 would be emulated, and slower")


def _flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return set(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def _threads() -> Iterator[Finding]:
    usable, asked = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    if bound:
        yield note(f"VLLM_CPU_OMP_THREADS_BIND={bound} decides which cores the engine uses", "unset it to let vLLM choose")
    elif asked is not None and asked.isdigit() and int(asked) < usable:
        yield note(f"OMP_NUM_THREADS={asked} on {usable} usable cores", "unset it, unless the other cores have work to do")
    else:
        yield good(f"{usable} usable cores")


def _libraries() -> Iterator[Finding]:
    loaded = os.environ.get("LD_PRELOAD", "")
    if line := preload():
        yield note("Intel's OpenMP is not preloaded; vLLM asks for it on x86", f'export LD_PRELOAD="{line}"')
    elif "libiomp5" in loaded:
        yield good("Intel's OpenMP is preloaded")
    if "tcmalloc" not in loaded:
        found = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
        how = f"preload {found}, too" if found else "install it (Debian: libtcmalloc-minimal4) and preload it"
        yield note("tcmalloc is not preloaded; vLLM recommends it", how)


def _load() -> Finding:
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > 0.25 * cores:
        return note(f"load {busy:.1f} on {cores} cores: others are at work here", "measure again when they are done")
    return good(f"load {busy:.1f} on {cores} cores")


def memory(weights: int, cache: int | None) -> Finding:
    """Compare what an engine needs with what is free; `weights` and `cache` in bytes, None where vLLM decides."""
    needed, free = weights + (cache or 0) + ENGINE, available_memory()
    part = "a K/V cache of what vLLM finds beside it" if cache is None else f"{cache / GIB:.1f} K/V cache"
    text = f"an engine needs about {needed / GIB:.1f} GiB ({weights / GIB:.1f} weights, {part})"
    if free is None:
        return good(text)
    if needed > free:
        return bad(f"{text}, {free / GIB:.1f} GiB are free", "lower VLLM_CPU_KVCACHE_SPACE (GiB), or free some memory")
    return good(f"{text}, {free / GIB:.1f} GiB are free")

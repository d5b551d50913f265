"""Tree attention as a compiled CPU kernel (`kernel.cpp`), built once per machine and kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from vllm_eagle import envs
from vllm_eagle.tree.rows import TreeRows

_SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
_ENTRY = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ARGUMENTS = [ctypes.c_void_p] * 12 + [ctypes.c_int64] * 10 + [ctypes.c_float, ctypes.c_int64, ctypes.c_float]


class NativeTreeAttention:
    """Attend with one parallel loop over (request, K/V head, tile of queries); the `vec` layout only."""

    def __init__(self) -> None:
        """Load the kernel, compiling it first if this machine has not yet; raises `OSError` without a compiler."""
        library = ctypes.CDLL(str(_build()))
        self._kernels = {}
        for dtype, name in _ENTRY.items():
            kernel = getattr(library, f"tree_attention_{name}")
            kernel.argtypes, kernel.restype = _ARGUMENTS, None
            self._kernels[dtype] = kernel

    def __call__(
        self,
        query: Tensor,
        tree_key: Tensor,
        tree_value: Tensor,
        cache: Tensor,
        rows: TreeRows,
        scale: float,
        output: Tensor,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> None:
        """See `TreeAttention`."""
        dense = (query.stride()[1:], tree_key.stride()[1:], tree_value.stride()[1:], output.stride()[1:])
        assert all(stride == (query.shape[2], 1) for stride in dense) and cache.is_contiguous()
        assert query.dtype == tree_key.dtype == tree_value.dtype == cache.dtype == output.dtype
        tables = (rows.query_start, rows.num_rows, rows.first_word, rows.key_start, rows.context_len, rows.block_table)
        self._kernels[query.dtype](
            *(x.data_ptr() for x in (query, tree_key, tree_value, cache, output, *tables, rows.words)),
            len(rows.num_rows),
            rows.block_table.stride(0),
            query.shape[1],
            tree_key.shape[1],
            query.shape[2],
            cache.shape[2],
            *(x.stride(0) for x in (query, tree_key, tree_value, output)),
            scale,
            window,
            soft_cap,
        )


def _build() -> Path:
    """Compile `kernel.cpp` for this machine unless the cache has it; safe when several processes start at once."""
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, envs.compiler(), _cpu())).encode()).hexdigest()[:16]
    target = envs.cache_dir() / f"tree_attention-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        subprocess.run([envs.compiler(), *_FLAGS, "-o", scratch, str(_SOURCE)], check=True, capture_output=True, text=True)
        os.replace(scratch, target)
    except subprocess.CalledProcessError as failed:
        Path(scratch).unlink()
        raise OSError(f"{envs.compiler()} failed: {failed.stderr.strip().splitlines()[:1]}") from None
    except OSError:
        Path(scratch).unlink()
        raise
    return target


def _cpu() -> str:
    """Identify the instruction set: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())

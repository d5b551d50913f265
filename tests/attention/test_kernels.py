"""The Triton kernels: under Triton's interpreter the numbers of the reference, and what its compiler makes of them for CUDA.

No GPU is needed, and nothing here speaks for one: the interpreter runs a kernel's programs in numpy, one after another. Its
products of bfloat16 are made in float32 (it would multiply their bits, triton-lang/triton#11584); loads and stores are not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.attention.kernel_checks import compare, compare_commit, compare_finish, compare_level, compare_step
from vllm_eagle.attention import kernels

Interpreted = Callable[..., Any]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size", "block"),
    [(F32, 6, 2, 64, 16), (F16, 3, 3, 96, 32), (BF16, 8, 1, 128, 16), (F16, 2, 1, 256, 16)],
)
def test_equals_reference(
    interpreted: Interpreted, dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int, splits: int
) -> None:
    """Catches a wrong page, head, ancestor or tail of a block, a part of the context left out or counted twice."""
    interpreted(compare, dtype, heads, kv_heads, size, block, splits=splits, tokens_first=splits == 1)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 1.5), (1, 0.0), (3, 0.4), (33, 0.0), (5000, 0.0)])
def test_windows_and_caps(interpreted: Interpreted, window: int, soft_cap: float, splits: int) -> None:
    """Catches a window counted from the root instead of the row, blocks before it read, scores capped twice or unscaled."""
    interpreted(compare, F32, 4, 2, 64, splits=splits, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("dtype", "fp8", "window"), [(F32, True, 0), (BF16, True, 5), (F16, False, 0)])
def test_sinks_and_eight_bits(interpreted: Interpreted, dtype: torch.dtype, fp8: bool, window: int, splits: int) -> None:
    """Catches a sink added once for each part, or in another base; scales of keys and values swapped or applied twice."""
    interpreted(compare, dtype, 4, 2, 64, splits=splits, sinks=True, fp8=fp8, window=window)


@pytest.mark.parametrize("splits", [1, 2])
def test_the_largest_tree(interpreted: Interpreted, splits: int) -> None:
    """Catches the last bit of a word, which is its sign, and rows of a tree in several tiles."""
    interpreted(compare, F32, 2, 1, 64, splits=splits, contexts=(21,), nodes=(63,), tile=32)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_level_being_drafted(interpreted: Interpreted, splits: int) -> None:
    """Catches queries taken for the tree's keys: while drafting, the keys are scratch rows."""
    interpreted(compare_level, splits)


@pytest.mark.parametrize(("dtype", "sinks"), [(F32, False), (BF16, True)])
def test_finishes_what_another_kernel_began(interpreted: Interpreted, dtype: torch.dtype, sinks: bool) -> None:
    """Catches log-sums of another base or order of axes than FlashAttention's, and its infinity where there is no context."""
    interpreted(compare_finish, dtype, sinks)


@pytest.mark.parametrize(("dtype", "tokens_first"), [(F32, False), (BF16, True), (torch.float8_e4m3fn, True)])
def test_commit(interpreted: Interpreted, dtype: torch.dtype, tokens_first: bool) -> None:
    """Catches a rejected row in the cache, a key where the value belongs, one group's slots used for another's layer."""
    interpreted(compare_commit, dtype, tokens_first)


def test_a_step(interpreted: Interpreted) -> None:
    """Catches rows of a larger step before this one, parts given too little room, kept K/V in another layer's cache."""
    interpreted(compare_step)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (9, 3, 64), (8, 1, 80), (4, 2, 128), (6, 3, 192), (2, 2, 256)]
)
@pytest.mark.parametrize(("window", "soft_cap", "sinks"), [(0, 0.0, False), (20, 0.0, True), (4, 1.0, False), (0, 30.0, True)])
def test_grid(
    interpreted: Interpreted, dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int, soft_cap: float,
    sinks: bool, splits: int, fp8: bool,
) -> None:  # fmt: skip
    """Catches two of these that do not go together."""
    interpreted(
        compare, dtype, heads, kv_heads, size, 32, splits=splits, window=window, soft_cap=soft_cap, sinks=sinks, fp8=fp8,
        contexts=(0, 1, 31, 32, 33, 100), nodes=(3, 1, 40, 0, 25, 60), step=32, tile=32,
    )  # fmt: skip


def test_plans() -> None:
    """Catches a chip left idle by few requests, parts too short to be worth a second launch, and tiles larger than the work."""
    llama_8b = {"heads": 32, "kv_heads": 8, "size": 128, "processors": 132}
    assert kernels.make_plan(64, 26, longest=4096, **llama_8b).splits == 1
    assert kernels.make_plan(1, 26, longest=300, **llama_8b).splits == 1
    few = kernels.make_plan(1, 26, longest=32768, **llama_8b)
    assert few.splits == 32 and few.tile == 128
    assert kernels.make_plan(1, 1, 4, 4, 64, 100, 132).tile == 16


# The compiler -------------------------------------------------------------------------------------------------------

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv"}
POINTERS = {
    "i32": ("query_start", "num_rows", "first_word", "key_start", "context_len", "block_table", "group"),
    "i64": ("words", "caches", "source", "slots"),
    "fp32": ("key_scale", "value_scale", "partial", "lse"),
}


def compile_for(
    capability: int, kernel: Any, constants: dict[str, Any], dtype: torch.dtype, kept: torch.dtype, warps: int
) -> Any:
    """Compile a kernel to machine code for CUDA, with the alignments a launch would find."""
    pointers = {name: kind for kind, names in POINTERS.items() for name in names}
    pointers |= dict.fromkeys(("query", "output", "sinks"), NAMES[dtype])
    pointers |= dict.fromkeys(("tree_key", "tree_value", "key_cache", "value_cache", "kept"), NAMES[kept])
    types = {name: f"*{pointers[name]}" if name in pointers else "i32" for name in kernel.arg_names}
    types |= {name: "fp32" for name in ("scale", "soft_cap") if name in types}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and (types[name][0] == "*" or name.endswith("stride"))
    }
    signature = {name: "constexpr" if name in constants else kind for name, kind in types.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3})


def constants(size: int, tile: int, keys: int, dtype: torch.dtype, everything: bool) -> dict[str, Any]:
    flags = {"CAPPED": everything, "SINKS": everything, "SCALED": everything, "WINDOW": 4096 if everything else 0}
    return {"GROUP": 4, "SIZE": size, "WIDE": size, "TILE": tile, "KEYS": keys, "DOT": kernels.DTYPES[dtype], **flags}


def of_attend(alone: bool, step: int) -> dict[str, Any]:
    return {"BLOCK": 16, "STEP": step, "ALONE": alone}


def test_compiles_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches what the interpreter lets through and the compiler does not: types, shapes, operations there are not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    small = constants(64, 16, 16, BF16, everything=True)
    fp8 = torch.float8_e4m3fn
    compile_for(90, kernels._attend, {**small, **of_attend(True, 16)}, BF16, fp8, 4)
    compile_for(90, kernels._attend, {**small, **of_attend(False, 16)}, BF16, fp8, 4)
    compile_for(80, kernels._finish, constants(64, 16, 16, F16, everything=False), F16, F16, 4)
    compile_for(80, kernels._commit, {"SIZE": 64, "NUMBERS": 128, "WIDE": 128, "BLOCK": 16}, BF16, BF16, 4)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("size", "tile", "step"), [(64, 128, 64), (128, 64, 64), (128, 128, 64), (256, 64, 32)])
def test_compiles_at_full_size(
    capability: int, size: int, tile: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches tiles that ask for more shared memory than a chip has, and loads of the context that are not pipelined."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    most = {80: 163 * 1024, 90: 227 * 1024}[capability]
    warps = 8 if tile * size > 64 * 128 else 4
    for alone in (True, False):
        made = compile_for(
            capability, kernels._attend, {**constants(size, tile, 64, BF16, False), **of_attend(alone, step)}, BF16, BF16, warps
        )
        assert made.metadata.shared <= most and "cp.async" in made.asm["ptx"]
    made = compile_for(capability, kernels._finish, constants(size, tile, 64, BF16, False), BF16, BF16, warps)
    assert made.metadata.shared <= most

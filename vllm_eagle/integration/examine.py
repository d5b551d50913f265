"""Answer `vllm-eagle doctor`'s questions about a target and a head, in a process of its own.

`python -m vllm_eagle.integration.examine fit|curve TARGET HEAD DTYPE` prints a line of JSON; it has an `error` where it fails.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

from vllm_eagle.errors import EagleError
from vllm_eagle.heads.checkpoint import check_folder
from vllm_eagle.speculate import speculate


def fit(target: str, head: str, dtype: str) -> dict[str, Any]:
    """Check a target and a head without reading a weight; sizes in bytes."""
    config = EngineArgs(target, dtype=dtype, **speculate(head)).create_engine_config()
    weights = [file for folder in (target, head) for file in Path(folder).glob("*.safetensors")]
    width = config.model_config.dtype.itemsize
    return {
        "architecture": config.model_config.architectures[0],
        "layers": config.model_config.get_num_layers(config.parallel_config),
        "kind": check_folder(Path(head)).kind,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "weights": sum(int(_values(file) * width) for file in weights),
        "cache": config.cache_config.kv_cache_memory_bytes,
    }


def _values(file: Path) -> int:
    """Count the numbers in a weight file."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
    total = 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def curve(target: str, head: str, dtype: str) -> dict[str, Any]:
    """Start an engine with adaptive trees and return the seconds it measured, by rows."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    llm = LLM(target, dtype=dtype, enforce_eager=True, max_num_seqs=16, max_model_len=1024, **speculate(head, tree_size="auto"))
    ((rows, seconds),) = llm.collective_rpc("step_costs")
    return {"rows": rows, "seconds": seconds}


def main() -> None:
    """Print one answer."""
    what, *rest = sys.argv[1:]
    try:
        found = {"fit": fit, "curve": curve}[what](*rest)
    except (EagleError, ValueError, OSError) as wrong:
        found = {"error": " ".join(str(wrong).split())[:300]}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

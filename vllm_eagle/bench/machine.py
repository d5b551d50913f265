"""What this machine can do at best: bytes and operations per second, and what they leave plain decoding.

`python -m vllm_eagle.bench.machine DTYPE` prints the measurement, made with the threads the contestants get.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_eagle.errors import EagleError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Model:
    """Know the sizes of a target that bound its speed."""

    weights: int
    """Parameters that every pass reads: all but an embedding that is not the LM head, too."""
    cache_values: int
    """Values of the K/V cache per token and layer."""
    layers: int

    @classmethod
    def read(cls, folder: Path) -> Model:
        """Read the sizes from `config.json` and the headers of the weights; raises `EagleError`."""
        files = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not files:
            raise EagleError(f"no config.json and *.safetensors in {folder}; give the folder of a model, Hugging Face layout")
        from safetensors import safe_open
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(folder)
        copy = "lm_head" if config.tie_word_embeddings else "embed_tokens"
        weights = 0
        for file in files:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118
                    weights += 0 if copy in name else _product(opened.get_slice(name).get_shape())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(weights, 2 * heads * size, config.num_hidden_layers)


def _product(shape: list[int]) -> int:
    return 1 if not shape else shape[0] * _product(shape[1:])


def limit(machine: Mapping[str, Any], model: Model, dtype: str, concurrency: int) -> float:
    """Return tokens per second no plain decoding can exceed here: a pass reads every weight and uses it for every request."""
    read: float = model.weights * BYTES[dtype] / (1e9 * max(machine["read_gb_s"], machine["copy_gb_s"]))
    computed: float = 2 * model.weights * concurrency / (1e9 * machine["gemm_gflops"])
    return concurrency / max(read, computed)


def measure_in_process(dtype: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Measure this machine in a process with the contestants' environment."""
    line = [sys.executable, "-m", "vllm_eagle.bench.machine", dtype]
    done = subprocess.run(line, env=dict(env), capture_output=True, text=True)
    if done.returncode:
        raise EagleError(f"the machine's limits could not be measured: {(done.stderr.strip() or 'killed').splitlines()[-1]}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def measure(dtype: str, megabytes: int = 256, side: int = 2048) -> dict[str, Any]:
    """Return bandwidth (GB/s, of a sum and a copy) and the rate of a square matrix product (GFLOP/s), best of five."""
    import torch

    numbers, target = torch.ones(megabytes << 18), torch.empty(megabytes << 18)
    a, b = torch.ones(side, side, dtype=getattr(torch, dtype)), torch.ones(side, side, dtype=getattr(torch, dtype))
    size = numbers.numel() * 4 / 1e9
    return {
        "read_gb_s": round(size / _best(numbers.sum), 2),
        "copy_gb_s": round(2 * size / _best(lambda: target.copy_(numbers)), 2),
        "gemm_gflops": round(2 * side**3 / 1e9 / _best(lambda: torch.mm(a, b)), 1),
        "threads": torch.get_num_threads(),
    }


def _best(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))

"""A folder's tensors, in whatever files they lie: `model.safetensors` or `pytorch_model.bin`, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from vllm_eagle.errors import HeadError

FILES = ("model.safetensors", "pytorch_model.bin")
"""The first that is there, whole or as an index of shards, is read."""

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}


def outline(folder: Path) -> dict[str, Tensor]:
    """Return every tensor's shape and dtype, without its numbers (device `meta`); raises `HeadError`."""
    return _gather(folder, _outline_of_safetensors, lambda path: _unpickled(path, "meta"))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor; raises `HeadError`. Pickled files are read as weights only: no code in them runs."""
    return _gather(folder, load_file, lambda path: _unpickled(path, "cpu"))


def files_of(folder: Path) -> list[Path]:
    """Return the weight files of a folder; raises `HeadError`."""
    for name in FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / shard for shard in dict.fromkeys(_weight_map(index).values())]
    raise HeadError(f"no {' or '.join(FILES)} in {folder}")


Reader = Callable[[Path], dict[str, Tensor]]


def _gather(folder: Path, safe: Reader, pickled: Reader) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in files_of(folder):
        if not path.is_file():
            raise HeadError(f"{folder}: {path.name}, which the index names, is missing; copy it too")
        with _readable(folder):
            found |= (safe if path.suffix == ".safetensors" else pickled)(path)
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        mapping: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as bad:
        raise HeadError(f"{index} is not an index of shards ({bad})") from None
    return mapping


def _outline_of_safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: torch.empty(part.get_shape(), dtype=_DTYPES.get(part.get_dtype(), torch.float32), device="meta")
            for name, part in slices.items()
        }


def _unpickled(path: Path, device: str) -> dict[str, Tensor]:
    found = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise HeadError(f"{path} does not hold named tensors")
    return found


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, RuntimeError, OSError, UnpicklingError, EOFError) as bad:
        raise HeadError(f"{folder}: the weight file cannot be read ({bad}); copy it again") from None

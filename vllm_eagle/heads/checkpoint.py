"""Read and write a head's folder: `config.json` and `model.safetensors` or `pytorch_model.bin`, in either layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_eagle.errors import HeadError
from vllm_eagle.heads import speculators
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.eagle1 import EagleHead
from vllm_eagle.heads.eagle3 import Eagle3Head

AnyHead = EagleHead | Eagle3Head

# Released heads may carry a copy of the target's embedding. It is frozen and shared: the target's own is used.
_SHARED = {"embed_tokens.weight"}
# The map of the draft vocabulary goes without saying where every token has a row.
_MAP = {"d2t", "t2d"}


def new_head(config: HeadConfig) -> AnyHead:
    """Make an untrained head of the kind that `config` describes."""
    return Eagle3Head(config) if config.is_eagle3 else EagleHead(config)


def read_config(folder: Path) -> HeadConfig:
    """Read the head's configuration alone, before any weight is touched; raises `HeadError`."""
    raw, where = _raw_config(folder), str(folder / "config.json")
    return HeadConfig.from_hf(speculators.config_to_here(raw, where) if speculators.KIND in raw else raw, where)


def _raw_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise HeadError(f"no config.json in {folder}; give the folder of an EAGLE head")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as bad:
        raise HeadError(f"{path} is not valid JSON ({bad})") from None
    return raw


def _own_name(folder: Path) -> Callable[[str], str]:
    """Return what turns a tensor's name in the file into ours."""
    return speculators.to_here if speculators.KIND in _raw_config(folder) else str


def check_folder(folder: Path) -> HeadConfig:
    """Check everything about a head that costs no weight read: its configuration, tensor names and shapes.

    Raises `HeadError`; a `pytorch_model.bin` keeps its names to itself until it is loaded.
    """
    config = read_config(folder)
    if (safe := folder / "model.safetensors").is_file():
        with _readable(folder), safe_open(safe, framework="pt") as file:
            own = _own_name(folder)
            shapes = {own(name): torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        _check_tensors(folder, config, shapes)
    elif not (folder / "pytorch_model.bin").is_file():
        raise HeadError(f"no model.safetensors or pytorch_model.bin in {folder}")
    return config


def load_head(folder: str | Path, dtype: torch.dtype | None = torch.float32) -> AnyHead:
    """Load a head for inference in `dtype`, None for the stored one; its config says of which kind and layout it is.

    Every tensor of the file is used, or named in the `HeadError` raised.
    """
    folder = Path(folder)
    config = check_folder(folder)
    with _readable(folder):
        if (safe := folder / "model.safetensors").is_file():
            weights = load_file(safe)
        else:
            weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    own = _own_name(folder)
    weights = {own(name): tensor for name, tensor in weights.items()}
    _check_tensors(folder, config, {name: tensor.shape for name, tensor in weights.items()})
    head = new_head(config).to(dtype or weights["fc.weight"].dtype)
    head.load_state_dict({name: weights.get(name, value) for name, value in head.state_dict().items()})
    if isinstance(head, Eagle3Head):
        try:
            head.check_vocabulary()
        except HeadError as bad:
            raise HeadError(f"{folder}: {bad}") from None
    return head.eval().requires_grad_(False)


def save_head(head: AnyHead, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the original layout; `load_head` reads it back, and an EAGLE-1 head vLLM's own EAGLE loader, too.

    Raises `HeadError`.
    """
    _write(Path(folder), head.config.to_hf(), head.state_dict(), dtype)


def save_speculators(
    head: AnyHead, folder: str | Path, verifier: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the `speculators` layout of an EAGLE-1 head for `verifier` (name_or_path, architectures). Raises `HeadError`."""
    config = speculators.config_to_there(head.config, verifier)
    _write(Path(folder), config, {speculators.to_there(name): t for name, t in head.state_dict().items()}, dtype)


def _write(folder: Path, config: dict[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write both files under temporary names first: a head that was there stays whole when the disk is full."""
    whole = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    weights = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in whole.items()}
    config = config | {"dtype": str(dtype).removeprefix("torch.")}
    halves = [folder / "config.tmp", folder / "model.tmp"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        halves[0].write_text(json.dumps(config, indent=1) + "\n")
        save_file(weights, halves[1], metadata={"format": "pt"})
        for half, name in zip(halves, ("config.json", "model.safetensors"), strict=True):
            os.replace(half, folder / name)
    except (OSError, SafetensorError) as bad:
        for half in halves:
            half.unlink(missing_ok=True)
        raise HeadError(f"{folder}: cannot write the head ({bad}); free some space and run again") from None


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, RuntimeError, OSError, UnpicklingError) as bad:
        raise HeadError(f"{folder}: the weight file cannot be read ({bad}); copy it again") from None


def _check_tensors(folder: Path, config: HeadConfig, found: Mapping[str, torch.Size]) -> None:
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in new_head(config).state_dict().items()}
    if config.draft_vocab_size == config.vocab_size and not _MAP & set(found):
        expected = {name: shape for name, shape in expected.items() if name not in _MAP}
    missing, unused = sorted(set(expected) - set(found)), sorted(set(found) - set(expected) - _SHARED)
    if missing:
        raise HeadError(f"{folder}: tensor {', '.join(missing)} is missing for an {config.kind} head of this config.json")
    if unused:
        raise HeadError(
            f"{folder}: tensor {', '.join(unused)} is not part of an {config.kind} head; remove it or fix config.json"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise HeadError(f"{folder}: {name} has shape {list(found[name])}, its config.json implies {list(shape)}")

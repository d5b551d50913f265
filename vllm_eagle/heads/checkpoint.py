"""Read and write a head's folder: `config.json` and `model.safetensors` or `pytorch_model.bin`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_eagle.errors import HeadError
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.eagle1 import EagleHead

# Released EAGLE-1 heads carry a copy of the target's embedding. It is frozen and shared: the target's own is used.
_SHARED = {"embed_tokens.weight"}


def read_config(folder: Path) -> HeadConfig:
    """Read the head's configuration alone, before any weight is touched; raises `HeadError`."""
    path = folder / "config.json"
    if not path.is_file():
        raise HeadError(f"no config.json in {folder}; give the folder of an EAGLE head")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as bad:
        raise HeadError(f"{path} is not valid JSON ({bad})") from None
    return HeadConfig.from_hf(raw, str(path))


def load_head(folder: str | Path, dtype: torch.dtype = torch.float32) -> EagleHead:
    """Load a head for inference in `dtype`; every tensor of the file is used, or named in the `HeadError` raised."""
    folder = Path(folder)
    config = read_config(folder)
    weights = _read_weights(folder)
    with torch.device("meta"):
        head = EagleHead(config)
    expected = {name: tensor.shape for name, tensor in head.state_dict().items()}
    _check_names(folder, set(expected), set(weights) - _SHARED)
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise HeadError(f"{folder}: {name} has shape {list(weights[name].shape)}, its config.json implies {list(shape)}")
    head = EagleHead(config)
    head.load_state_dict({name: weights[name] for name in expected})
    return head.to(dtype).eval().requires_grad_(False)


def save_head(head: EagleHead, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the original layout; `load_head` and vLLM's own EAGLE loader read it back."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = head.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    state = {name: tensor.detach().to(dtype).contiguous() for name, tensor in head.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _read_weights(folder: Path) -> Mapping[str, Tensor]:
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.is_file():
            return load_file(safe)
        if pickled.is_file():
            return torch.load(pickled, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (SafetensorError, RuntimeError, OSError) as bad:
        raise HeadError(f"{folder}: the weight file cannot be read ({bad}); copy it again") from None
    raise HeadError(f"no model.safetensors or pytorch_model.bin in {folder}")


def _check_names(folder: Path, expected: set[str], found: set[str]) -> None:
    missing, unused = sorted(expected - found), sorted(found - expected)
    if missing:
        raise HeadError(f"{folder}: tensor {', '.join(missing)} is missing for an EAGLE-1 head of this config.json")
    if unused:
        raise HeadError(f"{folder}: tensor {', '.join(unused)} is not part of an EAGLE-1 head; remove it or fix config.json")

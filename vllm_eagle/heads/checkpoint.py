"""Read and write a head's folder: `config.json` and its tensors, in any of the layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vllm_eagle.errors import HeadError
from vllm_eagle.heads import speculators
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.eagle1 import EagleHead
from vllm_eagle.heads.eagle3 import Eagle3Head
from vllm_eagle.heads.layouts import LEGACY, ORIGINAL, SPECULATORS, Layout, layout_named, layout_of
from vllm_eagle.heads.weights import outline, read_tensors

AnyHead = EagleHead | Eagle3Head

# The map of the draft vocabulary goes without saying where every token has a row.
_MAP = {"d2t", "t2d"}


def new_head(config: HeadConfig) -> AnyHead:
    """Make an untrained head of the kind that `config` describes."""
    return Eagle3Head(config) if config.is_eagle3 else EagleHead(config)


@dataclass(frozen=True)
class Checkpoint:
    """Know everything about a folder that costs no weight read."""

    folder: Path
    raw: Mapping[str, Any]
    """What its `config.json` says, the nested part of `speculators` unfolded."""
    layout: Layout
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    """The folder's tensors by the names of its files, without their numbers."""

    @classmethod
    def look(cls, folder: Path) -> Checkpoint:
        """Look at a folder; raises `HeadError` where it is no head, or one with a flag we do not know."""
        where = str(folder / "config.json")
        raw = _raw_config(folder)
        layout = layout_of(raw, where)
        if layout.name == SPECULATORS:
            raw = speculators.config_to_here(raw, where)
        try:
            config = HeadConfig.from_hf(raw, where)
        except HeadError:
            raise
        except (TypeError, ValueError, AttributeError) as bad:
            raise HeadError(f"{where}: a setting has a value of the wrong type ({bad})") from None
        tensors = outline(folder)
        with _naming(folder):
            names = layout.ours(tensors)
        legacy = any(name.startswith(old) for name in tensors for _, old in LEGACY)
        config = replace(
            config,
            own_embedding="embed_tokens.weight" in names or config.target_hidden_size is not None,
            fc_norm=config.fc_norm or (legacy and "fc_norm" not in raw),
        )
        return cls(folder, raw, layout, config, tensors)

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """Return the tensors the configuration asks for, by the names of the folder's layout."""
        with torch.device("meta"):
            state = new_head(self.config).state_dict()
        names = self.layout.ours(self.tensors)
        if self.config.draft_vocab_size == self.config.vocab_size and not _MAP & set(names):
            state = {name: tensor for name, tensor in state.items() if name not in _MAP}
        return {names.get(name, self.layout.theirs(name)): tensor for name, tensor in state.items()}

    def missing(self) -> list[str]:
        """Return the names of tensors the configuration asks for and the folder lacks."""
        return sorted(set(self.expected) - set(self.tensors))

    def unused(self) -> list[str]:
        """Return the names of tensors the folder has and the configuration has no place for."""
        return sorted(set(self.tensors) - set(self.expected))

    def check(self) -> None:
        """Raise `HeadError` naming every tensor that is missing, unused or of another shape."""
        kind, missing, unused = self.config.kind, self.missing(), self.unused()
        told = []
        if missing:
            told.append(f"tensor {', '.join(missing)} is missing for an {kind} head of this config.json")
        if unused:
            told.append(f"tensor {', '.join(unused)} is not part of an {kind} head; remove it or fix config.json")
        for name, tensor in self.expected.items():
            if name in self.tensors and (found := self.tensors[name]).shape != tensor.shape:
                told.append(f"{name} has shape {list(found.shape)}, its config.json implies {list(tensor.shape)}")
        if told:
            raise HeadError(f"{self.folder}: {'; '.join(told)}")


def _raw_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise HeadError(f"no config.json in {folder}; give the folder of an EAGLE head")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as bad:
        raise HeadError(f"{path} is not valid JSON ({bad})") from None
    if not isinstance(raw, dict):
        raise HeadError(f"{path} is not an object of settings")
    return raw


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except HeadError as bad:
        raise HeadError(f"{folder}: {bad}") from None


def check_folder(folder: Path) -> HeadConfig:
    """Check everything about a head that costs no weight read: its configuration, tensor names and shapes.

    Raises `HeadError`.
    """
    found = Checkpoint.look(folder)
    found.check()
    return found.config


def load_head(folder: str | Path, dtype: torch.dtype | None = torch.float32) -> AnyHead:
    """Load a head for inference in `dtype`, None for the stored one; its folder says of which kind and layout it is.

    Every tensor of the file is used, or named in the `HeadError` raised.
    """
    found = Checkpoint.look(Path(folder))
    found.check()
    tensors = read_tensors(found.folder)
    weights = {ours: tensors[theirs] for ours, theirs in found.layout.ours(tensors).items()}
    head = new_head(found.config).to(dtype or weights["fc.weight"].dtype)
    head.load_state_dict({name: weights.get(name, value) for name, value in head.state_dict().items()})
    if isinstance(head, Eagle3Head):
        with _naming(found.folder):
            head.check_vocabulary()
    return head.eval().requires_grad_(False)


def save_head(head: AnyHead, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the original layout; `load_head` reads it back, and an EAGLE-1 head vLLM's own EAGLE loader, too.

    Raises `HeadError`.
    """
    write_folder(Path(folder), head.config, ORIGINAL, _cast(head, dtype))


def save_speculators(
    head: AnyHead, folder: str | Path, verifier: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the `speculators` layout of a head for `verifier` (name_or_path, architectures). Raises `HeadError`."""
    write_folder(Path(folder), head.config, SPECULATORS, _cast(head, dtype), verifier)


def write_folder(
    folder: Path, config: HeadConfig, layout: str, tensors: Mapping[str, Tensor], verifier: Mapping[str, Any] | None = None
) -> None:
    """Write tensors, by our names, as they are, in one of the layouts; `speculators` names a `verifier`. Raises `HeadError`.

    Both files are written under temporary names first: a head that was there stays whole when the disk is full.
    """
    names = layout_named(layout, config.kind)
    if layout == SPECULATORS:
        raw = speculators.config_to_there(config, verifier or {})
    elif config.layernorms:
        raise HeadError("the original layout has no place for the layernorms of this EAGLE-1 head; use --layout speculators")
    else:
        raw = config.to_hf()
    raw |= {"dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    halves = [folder / "config.tmp", folder / "model.tmp"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        halves[0].write_text(json.dumps(raw, indent=1) + "\n")
        save_file({names.theirs(name): tensor for name, tensor in tensors.items()}, halves[1], metadata={"format": "pt"})
        for half, name in zip(halves, ("config.json", "model.safetensors"), strict=True):
            os.replace(half, folder / name)
    except (OSError, SafetensorError) as bad:
        for half in halves:
            half.unlink(missing_ok=True)
        raise HeadError(f"{folder}: cannot write the head ({bad}); free some space and run again") from None


def _cast(head: AnyHead, dtype: torch.dtype) -> dict[str, Tensor]:
    state = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}

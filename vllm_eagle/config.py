"""The options of speculation: one frozen type, read from vLLM's `additional_config["vllm_eagle"]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_eagle.errors import EagleError
from vllm_eagle.heads.hub import find_folder
from vllm_eagle.tree import DynamicGrowth, Growth, read_static

KEY = "vllm_eagle"
"""Our key in vLLM's `--additional-config`."""

HEAD_DRAFTER = "head"
AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """Say which head drafts, and what trees it grows; every field is a key of `additional_config["vllm_eagle"]`."""

    model: str | None = None
    """Folder of the EAGLE head, or its repository on the hub."""
    tree_size: int | str | None = None
    """Most nodes of a dynamic tree, or "auto", the default: as many as pay at the load of the moment, at most 25."""
    tree_depth: int | None = None
    """Levels of a dynamic tree (default 5)."""
    tree_top_k: int | None = None
    """Nodes expanded on a level, and candidates of each, in a dynamic tree (default 8)."""
    tree: str | None = None
    """JSON file of a static tree, instead of a dynamic one."""
    draft_vocab: str | None = None
    """JSON file of the token ids worth drafting, or "all"; default: `draft_vocab.json` of the head's folder, if any."""
    max_context: int | None = None
    """Longest request that is drafted for, in tokens (default: the positions the head was made for)."""
    trace: str | None = None
    """Folder that gets a page for each request that asks for one (`speculative_trace` in its extra arguments)."""
    aux_layers: Sequence[int] | None = None
    """Layers of the target whose inputs an EAGLE-3 head reads (default: those its config.json names, or the usual ones)."""
    drafter: str = HEAD_DRAFTER
    """"head", or the dotted path of a drafter class."""
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to that class."""

    def __post_init__(self) -> None:
        if self.drafter == HEAD_DRAFTER and self.model is None:
            raise EagleError("no head given: name its folder with --speculative-model (or the key model of vllm_eagle)")
        if self.drafter == HEAD_DRAFTER and self.drafter_options:
            raise EagleError("drafter_options have no effect on the head; name a drafter class, or remove them")
        for name in ("tree_size", "tree_depth", "tree_top_k"):
            if self.tree is not None and getattr(self, name) is not None:
                raise EagleError(f"{name} has no effect on the static tree {self.tree}; give one of the two")
        if self.trace is not None and not Path(self.trace).is_dir():
            raise EagleError(f"trace={self.trace!r} is not a folder; make it first: pages about requests are written there")

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Options:
        """Read the options; raises `EagleError` for a key that does not exist or a value of the wrong type."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for key, value in raw.items():
            if key not in known:
                raise EagleError(f"unknown option {key!r} of vllm_eagle; known: {', '.join(sorted(known))}")
            whole = key in ("tree_size", "tree_depth", "tree_top_k", "max_context")
            if whole and value is not None and type(value) is not int and (key, value) != ("tree_size", AUTO):
                raise EagleError(f"{key}={value!r}: want a whole number" + (f', or "{AUTO}"' if key == "tree_size" else ""))
            if key == "aux_layers" and not _is_list_of_layers(value):
                raise EagleError(f"{key}={value!r}: want a list of layer numbers")
            if not whole and key not in ("drafter_options", "aux_layers") and not isinstance(value, str | None):
                raise EagleError(f"{key}={value!r}: want a string")
        return cls(**raw)

    def to_mapping(self) -> dict[str, Any]:
        """Return what `from_mapping` reads back, defaults left out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        usual = {"drafter": HEAD_DRAFTER, "drafter_options": {}}
        return {name: value for name, value in values.items() if value != usual.get(name)}

    @property
    def adaptive(self) -> bool:
        """Tell whether the size of trees follows the load."""
        return self.tree is None and self.tree_size in (None, AUTO)

    def growth(self) -> Growth:
        """Build the growth policy; raises `TreeError` for a shape outside the limits."""
        if self.tree is not None:
            return read_static(self.tree)
        size = 25 if self.tree_size is None or isinstance(self.tree_size, str) else self.tree_size
        depth, top_k = (default if value is None else value for value, default in ((self.tree_depth, 5), (self.tree_top_k, 8)))
        return DynamicGrowth(size, depth, top_k)

    @property
    def folder(self) -> Path:
        """Return the head's folder, fetched where it was given as a hub's repository; raises `HeadError`."""
        assert self.model is not None, "no head was given"
        return find_folder(self.model)

    def vocabulary_file(self) -> Path | None:
        """Return the draft vocabulary's file, None for the whole vocabulary."""
        if self.draft_vocab == "all":
            return None
        if self.draft_vocab is not None:
            return Path(self.draft_vocab)
        beside = self.folder / "draft_vocab.json" if self.model else None
        return beside if beside is not None and beside.is_file() else None


def _is_list_of_layers(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and all(type(layer) is int for layer in value))

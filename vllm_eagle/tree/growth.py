"""How a tree grows: which candidates are expanded, level by level, and which are kept.

Drafting one level turns every frontier node into its `top_k` best children. A policy answers two questions about
these candidates, for all requests at once: which are run through the head next, and which make the final tree.

Shapes: `R` requests, `F` frontier nodes, `k` candidates of a node, `P` candidates of a request so far, `N` kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vllm_eagle.errors import TreeError
from vllm_eagle.tree.draft_tree import MAX_NODES

MAX_DEPTH = 16
"""Deepest level a policy may ask for; acceptance there is far below any price."""


class Growth(Protocol):
    """Decide the shape of trees; one instance serves every request and step."""

    @property
    def size(self) -> int:
        """Most nodes of a tree."""
        ...

    @property
    def depth(self) -> int:
        """Most levels below the root."""
        ...

    @property
    def top_k(self) -> int:
        """Candidates wanted of each expanded node."""
        ...

    @property
    def scratch(self) -> int:
        """Nodes of one request run through the head in one step: rows of scratch K/V."""
        ...

    def expand(self, level: int, values: Tensor) -> Tensor:
        """Pick from the candidates of `level` (1 = children of the root) those to run through the head.

        `values` [R, F*k] are log path values; returns indices [R, F'] into them.
        """
        ...

    def keep(self, values: Tensor) -> Tensor:
        """Pick the final nodes from all candidates [R, P], level after level; returns indices [R, N], parents first."""
        ...


@dataclass(frozen=True)
class DynamicGrowth:
    """Expand the best `top_k` nodes of a level, keep the best `size` of all by path value (EAGLE-2, section 4)."""

    size: int
    depth: int
    top_k: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise TreeError(f"tree_size={self.size}: a tree has at least 1 node; to switch speculation off, leave the head out")
        if self.size > MAX_NODES:
            raise TreeError(f"tree_size={self.size} is over the limit of {MAX_NODES} nodes")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise TreeError(f"tree_depth={self.depth} is outside 1..{MAX_DEPTH}")
        if self.top_k < 1:
            raise TreeError(f"tree_top_k={self.top_k}: at least 1 candidate per node")
        if self.scratch > MAX_NODES:
            raise TreeError(
                f"tree_top_k={self.top_k} with tree_depth={self.depth} expands {self.scratch} nodes,"
                f" over the limit of {MAX_NODES}; lower one of them"
            )

    @property
    def scratch(self) -> int:
        """Every level but the last is expanded, `top_k` nodes wide."""
        return self.top_k * (self.depth - 1)

    def expand(self, level: int, values: Tensor) -> Tensor:
        """Take the best `top_k` of the level."""
        return values.topk(min(self.top_k, values.shape[1]), dim=1).indices

    def keep(self, values: Tensor) -> Tensor:
        """Take the best `size`, best first; among equals the earlier, so a parent is never dropped before its child.

        A child's value is at most its parent's and it stands later, hence the order is topological and closed.
        """
        order = values.sort(dim=1, descending=True, stable=True).indices
        return order[:, : self.size]


def chain(depth: int) -> DynamicGrowth:
    """Return the tree of width one."""
    return DynamicGrowth(size=depth, depth=depth, top_k=1)


class StaticGrowth:
    """Grow the same shape always: a list of root-to-node paths of child ranks (EAGLE-1, section 4.2).

    `[[0], [1], [0, 0]]` is: the best and second best child of the root, and the best child of the first.
    """

    def __init__(self, paths: Iterable[Iterable[int]]) -> None:
        """Order the paths by depth; raises `TreeError` for a missing parent, a repeated path or a limit passed."""
        shape = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        _check_paths(shape)
        self.paths = shape
        self.size, self.depth = len(shape), max(map(len, shape))
        self.top_k = 1 + max(max(path) for path in shape)
        self._expand: list[Tensor] = []
        self._keep = self._place(shape)
        self.scratch = sum(chosen.shape[1] for chosen in self._expand)

    def expand(self, level: int, values: Tensor) -> Tensor:
        """Return the candidates of this level that have children in the shape."""
        return self._expand[level - 1].to(values.device).expand(values.shape[0], -1)

    def keep(self, values: Tensor) -> Tensor:
        """Return the shape's nodes, level by level."""
        return self._keep.to(values.device).expand(values.shape[0], -1)

    def _place(self, shape: list[tuple[int, ...]]) -> Tensor:
        """Find each path among the candidates: frontier slot times `top_k` plus rank, after all earlier levels."""
        inner = {path[:-1] for path in shape}
        slots: dict[tuple[int, ...], int] = {(): 0}
        place: list[int] = []
        start = 0
        for level in range(1, self.depth + 1):
            nodes = [path for path in shape if len(path) == level]
            local = [slots[path[:-1]] * self.top_k + path[-1] for path in nodes]
            chosen = [at for path, at in zip(nodes, local, strict=True) if path in inner]
            place += [start + at for at in local]
            start += len(slots) * self.top_k
            slots = {path: slot for slot, path in enumerate(path for path in nodes if path in inner)}
            if level < self.depth:
                self._expand.append(torch.tensor(chosen).unsqueeze(0))
        return torch.tensor(place).unsqueeze(0)


def read_static(path: str | Path) -> StaticGrowth:
    """Read a static tree from a JSON file: a list of paths; raises `TreeError` naming the file."""
    try:
        paths = json.loads(Path(path).read_text())
    except OSError as bad:
        raise TreeError(f"static tree {path} cannot be read ({bad.strerror})") from None
    except json.JSONDecodeError as bad:
        raise TreeError(f"static tree {path} is not valid JSON ({bad})") from None
    good = isinstance(paths, list) and all(isinstance(p, list) and all(type(i) is int for i in p) for p in paths)
    if not good:
        raise TreeError(f"static tree {path}: want a list of paths like [[0], [1], [0, 0]]")
    try:
        return StaticGrowth(paths)
    except TreeError as bad:
        raise TreeError(f"static tree {path}: {bad}") from None


def _check_paths(shape: list[tuple[int, ...]]) -> None:
    if not shape:
        raise TreeError("a static tree has at least 1 path")
    if len(shape) > MAX_NODES:
        raise TreeError(f"{len(shape)} paths are over the limit of {MAX_NODES} nodes")
    known: set[tuple[int, ...]] = set()  # parents are shorter and stand before
    for path in shape:
        if not path or not 0 <= min(path) <= max(path) < MAX_NODES:
            raise TreeError(f"path {list(path)}: want child ranks from 0 to {MAX_NODES - 1}")
        if len(path) > MAX_DEPTH:
            raise TreeError(f"path {list(path)} is deeper than {MAX_DEPTH}")
        if len(path) > 1 and path[:-1] not in known:
            raise TreeError(f"path {list(path)} has no parent {list(path[:-1])}")
        if path in known:
            raise TreeError(f"path {list(path)} is there twice")
        known.add(path)

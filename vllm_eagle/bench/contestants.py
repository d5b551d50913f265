"""Who takes part: plain decoding, this plugin, vLLM's other ways to speculate, and Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_eagle.errors import EagleError

PLAIN, AUTO = "plain", "auto"
KNOWN = {
    "plain": "vLLM without speculation; every ratio is to it, and it always takes part",
    "auto": "this plugin, as many nodes as pay",
    "tree:N": "this plugin, trees of N nodes (tree:NxD: of D levels)",
    "chain:K": "vLLM's own EAGLE with the same head, chains of K tokens",
    "ngram": "vLLM's n-gram lookup (ngram:K: K tokens, default 5)",
    "suffix": "vLLM's suffix decoding (needs the package arctic-inference)",
    "hf": "Hugging Face generate, one request at a time",
    "hf-lookup": "the same with prompt lookup (hf-lookup:K: K tokens, default 10)",
}
_SHAPE = re.compile(r"(plain|auto|tree|chain|ngram|suffix|hf|hf-lookup)(?::(\d+)(?:x(\d+))?)?")
_SIZED = {"tree": True, "chain": True, "ngram": False, "hf-lookup": False}
"""Kinds that take a size, and whether they need one."""


@dataclass(frozen=True)
class Contestant:
    """Name one way to decode; `size` and `depth` are None for the kind's default."""

    name: str
    kind: str
    size: int | None = None
    depth: int | None = None

    @property
    def needs_head(self) -> bool:
        """Tell whether it drafts with the EAGLE head."""
        return self.kind in ("auto", "tree", "chain")

    @property
    def is_hugging_face(self) -> bool:
        """Tell whether it is Hugging Face's, which answers one request at a time."""
        return self.kind.startswith("hf")

    @property
    def module(self) -> str:
        """Return the module its process runs."""
        return "vllm_eagle.bench.hugging" if self.is_hugging_face else "vllm_eagle.integration.bench_engine"

    def serves(self, concurrency: int) -> bool:
        """Tell whether it can answer so many requests at once."""
        return concurrency == 1 or not self.is_hugging_face

    def repeats(self, temperature: float) -> bool:
        """Tell whether its texts must be plain decoding's: sampled ones only where the same noise is drawn."""
        return temperature == 0 or self.kind in ("plain", "auto", "tree")


def parse(name: str) -> Contestant:
    """Read a contestant such as `tree:25`; raises `EagleError`."""
    found = _SHAPE.fullmatch(name)
    if found is None:
        raise EagleError(f"unknown contestant {name!r}; known: {', '.join(KNOWN)}")
    kind, size, depth = found[1], *(None if part is None else int(part) for part in found.groups()[1:])
    if size is None and _SIZED.get(kind, False):
        raise EagleError(f"contestant {name!r} needs a size, as in {kind}:{25 if kind == 'tree' else 3}")
    if size is not None and (kind not in _SIZED or size < 1):
        raise EagleError(f"contestant {name!r}: {kind} takes " + ("1 or more" if kind in _SIZED else f"no size; write {kind}"))
    if depth is not None and kind != "tree":
        raise EagleError(f"contestant {name!r}: levels are for trees, as in tree:12x4")
    if kind == "tree":
        from vllm_eagle.config import Options

        Options("head", tree_size=size, tree_depth=depth).growth()
    return Contestant(name, kind, size, depth)


def parse_all(names: Sequence[str], head: bool) -> tuple[Contestant, ...]:
    """Read all of them, plain decoding first; `head` tells whether there is one. Raises `EagleError`."""
    found = tuple(parse(name) for name in dict.fromkeys((PLAIN, *names)))
    for contestant in found:
        if contestant.needs_head and not head:
            raise EagleError(f"contestant {contestant.name} drafts with a head; give --head, or leave it out")
    return found

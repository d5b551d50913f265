"""The layouts of a head's folder: what each calls our tensors. A layout is told from `config.json` alone.

Our names are those of the original layouts: `fc`, `layers.0` (EAGLE-1), `midlayer` (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_eagle.errors import HeadError
from vllm_eagle.heads.config import is_eagle3

SPECULATORS_KIND = "speculators_model_type"


@dataclass(frozen=True)
class Layout:
    """Pair the beginnings of our names with those of a layout's; every other name is the same in both."""

    name: str
    kind: str
    prefixes: tuple[tuple[str, str], ...] = ()

    def theirs(self, name: str) -> str:
        """Return the layout's name of a tensor of ours."""
        return _renamed(name, self.prefixes)

    def ours(self, names: Iterable[str]) -> dict[str, str]:
        """Return the layout's names by ours; raises `HeadError` where two of them are the same tensor."""
        found: dict[str, str] = {}
        for theirs in names:
            ours = _renamed(theirs.removeprefix("model."), _turned(LEGACY))
            ours = _renamed(ours, _turned(self.prefixes))
            if (other := found.setdefault(ours, theirs)) != theirs:
                raise HeadError(f"{other} and {theirs} are the same tensor of an {self.kind} head; remove one of them")
        return found


LEGACY = (("fc_norm.0.", "aux_norm_low."), ("fc_norm.1.", "aux_norm_mid."), ("fc_norm.2.", "aux_norm_high."))
"""Names that are read and no longer written."""

ORIGINAL, SPECULATORS = "original", "speculators"
LAYOUTS = (
    Layout(ORIGINAL, "EAGLE-1"),
    Layout(ORIGINAL, "EAGLE-3"),
    Layout(SPECULATORS, "EAGLE-1", (("fc.", "fusion_fc."), ("layers.0.", "transformer."))),
    Layout(SPECULATORS, "EAGLE-3", (("midlayer.", "layers.0."),)),
)


def layout_named(name: str, kind: str) -> Layout:
    """Return the layout of that name for heads of that kind."""
    return next(layout for layout in LAYOUTS if (layout.name, layout.kind) == (name, kind))


def layout_of(raw: Mapping[str, Any], where: str) -> Layout:
    """Tell the layout of a folder from its `config.json`; raises `HeadError` for a kind of head that is none of ours."""
    kinds = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3"}
    if (theirs := raw.get(SPECULATORS_KIND)) is None:
        return layout_named(ORIGINAL, "EAGLE-3" if is_eagle3(raw) else "EAGLE-1")
    if theirs not in kinds:
        raise HeadError(f"{where}: {SPECULATORS_KIND}={theirs!r} is not supported (only {', '.join(map(repr, kinds))})")
    return layout_named(SPECULATORS, kinds[theirs])


def _turned(prefixes: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((there, here) for here, there in prefixes)


def _renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    return next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), name)

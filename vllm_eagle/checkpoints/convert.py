"""Write a head again in another layout, bit for bit, with its draft vocabulary and its card beside it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_eagle.errors import EagleError
from vllm_eagle.heads.checkpoint import Checkpoint, load_head, write_folder
from vllm_eagle.heads.hub import find_folder
from vllm_eagle.heads.layouts import SPECULATORS
from vllm_eagle.heads.target import TargetShape
from vllm_eagle.heads.weights import read_tensors

_BESIDE = ("draft_vocab.json", "README.md")


def convert(
    head: str | Path, layout: str, out: Path, target: str | None = None, aux_layers: Sequence[int] | None = None
) -> None:
    """Write `head`, a folder or a hub's repository, to `out`; raises `EagleError`.

    The `speculators` layout names the `target` the head was made for, which a head in that layout already does.
    `aux_layers` are written in place of those the head names.
    """
    folder = find_folder(head)
    if out.resolve() == folder.resolve():
        raise EagleError(f"--out {out} is the head's own folder; give another one")
    load_head(folder, None)  # a head that cannot be read is not to be spread
    found = Checkpoint.look(folder)
    stored = read_tensors(folder)
    tensors = {ours: stored[theirs] for ours, theirs in found.layout.ours(stored).items()}
    verifier = _verifier(found.raw, target) if layout == SPECULATORS else None
    write_folder(out, found.config.reading(aux_layers), layout, tensors, verifier)
    for name in _BESIDE:
        if (folder / name).is_file():
            shutil.copy(folder / name, out / name)


def _verifier(raw: Mapping[str, Any], target: str | None) -> Mapping[str, Any]:
    if target is not None:
        return {"name_or_path": Path(target).name, "architectures": list(TargetShape.read(target).architectures)}
    named: Mapping[str, Any] | None = (raw.get("speculators_config") or {}).get("verifier")
    if named is None:
        raise EagleError("the speculators layout names the target; give --model")
    return named

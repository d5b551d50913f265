"""Write an exported head again in another layout, with its draft vocabulary and its card beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoConfig

from vllm_eagle.errors import EagleError
from vllm_eagle.heads import load_head, save_head, save_speculators

_BESIDE = ("draft_vocab.json", "README.md")


def export(head_folder: Path, layout: str, out: Path, target: Path | None = None) -> None:
    """Write the head in `head_folder` to `out`, bit for bit; raises `EagleError`.

    The `speculators` layout, for EAGLE-1 alone, names the `target` (its folder) the head was made for.
    """
    if out.resolve() == head_folder.resolve():
        raise EagleError(f"--out {out} is the head's own folder; give another one")
    head = load_head(head_folder, None)
    dtype = head.fc.weight.dtype
    if layout == "original":
        save_head(head, out, dtype)
    elif target is None:
        raise EagleError("the speculators layout names the target; give --model")
    else:
        save_speculators(head, out, _verifier(target), dtype)
    for name in _BESIDE:
        if (head_folder / name).is_file():
            shutil.copy(head_folder / name, out / name)


def _verifier(target: Path) -> dict[str, object]:
    try:
        config = AutoConfig.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as bad:
        raise EagleError(f"{target}: the target cannot be read ({str(bad).splitlines()[0]})") from None
    return {"name_or_path": target.name, "architectures": config.architectures or []}

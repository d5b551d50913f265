"""Where a head lies: a folder of this machine, or a repository of the Hugging Face hub in the local cache."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from vllm_eagle.errors import HeadError

_WANTED = ["*.json", "model*.safetensors", "pytorch_model*.bin"]
_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def find_folder(head: str | Path) -> Path:
    """Return the folder of a head, given as a path or as a hub's OWNER/NAME or OWNER/NAME@REVISION.

    What is not in the cache is fetched, unless HF_HUB_OFFLINE says otherwise. Raises `HeadError`.
    """
    path = Path(head)
    return path if path.exists() or not _ID.fullmatch(str(head)) else _fetched(str(head))


@cache
def _fetched(head: str) -> Path:
    from huggingface_hub import snapshot_download  # only who names a repository pays for it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = head.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as bad:
        raise HeadError(f"head {head}: no such folder, and no such repository in reach ({str(bad).splitlines()[0]})") from None

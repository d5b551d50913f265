"""What the jobs of this folder are started with."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def command(folders: tuple[str, str]) -> list[str]:
    target, head = folders
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--disable-log-stats"]
    return [*flags, "--model", target, "--speculative-model", head, "--speculative-tree-size", "12"]

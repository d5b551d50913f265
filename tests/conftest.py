"""Models and engines shared by tests: each is made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    from vllm_eagle.testing import tiny_target

    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    from vllm_eagle.testing import tiny_head

    return tiny_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a head that guesses right now and then."""
    from vllm_eagle.testing import tiny_head, tiny_target

    root = tmp_path_factory.mktemp("models")
    return tiny_target(root / "target", damping=0.002), tiny_head(root / "head", copies=True)


@pytest.fixture(scope="module")
def full_precision() -> Iterator[None]:
    """Heads as on a machine without 8-bit dot products: what they compute can be compared to many digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cpu._is_vnni_supported", lambda: False)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent

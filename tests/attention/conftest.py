"""A second process in which Triton interprets kernels: it decides that when it is imported, and this process compiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Return a function that calls another one, of an importable module, in the interpreting process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        pool.submit(os.getpid).result()  # it has started, with that variable
    with pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()

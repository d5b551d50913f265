"""How many nodes one request may draft now: by its own wish, by its length, and only once its prompt is finished."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

REQUEST_KEY = "speculative_tree_size"
"""Key of a request's `extra_args` (over HTTP: `vllm_xargs`): most nodes for this request, 0 for none."""


def wished_size(params: SamplingParams | None) -> int | None:
    """Return the most nodes the request asks for, None if it leaves that to the engine."""
    wish: int | None = ((params.extra_args if params else None) or {}).get(REQUEST_KEY)
    return wish


def check_wish(params: SamplingParams) -> None:
    """Check a request's own size when it is admitted; raises `VLLMValidationError`, which a server answers with status 400."""
    wish: Any = wished_size(params)
    if wish is not None and (type(wish) is not int or wish < 0):
        raise VLLMValidationError(
            f"{REQUEST_KEY}={wish!r}: want a whole number of nodes, 0 for no speculation in this request", parameter=REQUEST_KEY
        )


def room(size: int, wish: int | None, length: int, longest: int, max_model_len: int) -> int:
    """Return the most nodes for a request of `length` tokens: none beyond `longest`, none at or past the engine's limit."""
    if length > longest:
        return 0
    return max(0, min(size if wish is None else min(size, wish), max_model_len - 1 - length))

"""Choose the tree attention once, at start-up, and say why."""

from __future__ import annotations

import logging

from vllm_eagle import envs
from vllm_eagle.attention.base import TreeAttention
from vllm_eagle.attention.layout import VEC_LAYOUT
from vllm_eagle.attention.native import NativeTreeAttention
from vllm_eagle.attention.reference import ReferenceTreeAttention
from vllm_eagle.errors import EagleError

logger = logging.getLogger(__name__)


def choose() -> TreeAttention:
    """Return the native kernel where it builds, else the reference, with the reason in the log.

    Raises `EagleError` when `VLLM_EAGLE_ATTENTION` names no implementation, or forces one that does not build.
    """
    wanted = envs.attention_override()
    if wanted not in (None, "native", "reference"):
        raise EagleError(f"VLLM_EAGLE_ATTENTION={wanted!r} is unknown; use native or reference")
    if wanted == "reference":
        logger.info("tree attention: reference (VLLM_EAGLE_ATTENTION)")
        return ReferenceTreeAttention(VEC_LAYOUT)
    try:
        kernel = NativeTreeAttention()
    except OSError as failed:
        if wanted == "native":
            raise EagleError(f"VLLM_EAGLE_ATTENTION=native, but the kernel cannot be built: {failed}") from None
        logger.warning(
            "tree attention: reference, slow (the native kernel cannot be built: %s); install g++ or set CXX", failed
        )
        return ReferenceTreeAttention(VEC_LAYOUT)
    logger.info("tree attention: native")
    return kernel

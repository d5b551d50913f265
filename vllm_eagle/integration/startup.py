"""What the runner sets up once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from vllm_eagle.attention import VEC_LAYOUT, TreeAttention, choose
from vllm_eagle.errors import EagleError
from vllm_eagle.integration.attention import TreeCPUAttentionImpl


def share_log() -> None:
    """Send our log lines where vLLM's go; a logger named `vllm_eagle` is no child of `vllm`."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_eagle")
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.level)


def choose_attention(layers: Mapping[str, Any]) -> TreeAttention:
    """Check every layer's class, and the cache layout against the engine's own write op, then choose; raises `EagleError`."""
    attention = [layer for layer in layers.values() if isinstance(layer, Attention)]
    for layer in attention:
        if type(layer.impl) is not TreeCPUAttentionImpl:
            raise EagleError(f"layer {layer.layer_name} attends through {type(layer.impl).__name__}, which cannot verify trees")
    for layer in {layer.kv_cache.shape[1:]: layer for layer in attention}.values():
        scratch = torch.zeros((2, *layer.kv_cache.shape[1:]), dtype=layer.kv_cache.dtype)

        def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, layer: Any = layer) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

        if not VEC_LAYOUT.holds(write, scratch):
            raise EagleError(
                f"this CPU stores K/V in a layout we do not know (isa {layer.isa}, {layer.kv_cache.dtype}); use --dtype float32"
            )
    return choose()

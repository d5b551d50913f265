"""The `config.json` of the `speculators` layout: the layer's shape in a nested config, the rest beside it.

ours                                there
bias                 (EAGLE-1)      fusion_bias
layernorms           (EAGLE-1)      layernorms
draft_vocab_size, flags (EAGLE-3)   the same
everything else                     transformer_layer_config.*
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from vllm_eagle.errors import HeadError
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.flags import AUX_IDS, NORM_FLAGS
from vllm_eagle.heads.layouts import SPECULATORS_KIND

logger = logging.getLogger(__name__)

_LAYER = "transformer_layer_config"


def config_to_there(config: HeadConfig, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout's `config.json`; `verifier` holds name_or_path and architectures of the target.

    Raises `HeadError` for what the layout has no place for.
    """
    if config.num_layers != 1 and not config.is_eagle3:
        raise HeadError(
            f"the speculators layout holds 1 decoder layer, this head has {config.num_layers}; use --layout original"
        )
    if config.qkv_bias != config.o_bias or (config.is_eagle3 and config.fusion_bias):
        what = "fc.bias" if config.qkv_bias == config.o_bias else "biases of q, k and v without one of o_proj"
        raise HeadError(f"the speculators layout has no place for {what} of an {config.kind} head; use --layout original")
    return {**(_eagle3(config) if config.is_eagle3 else _eagle1(config)), _LAYER: _layer(config), **_how(config, verifier)}


def config_to_here(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the original layout's dictionary for `HeadConfig.from_hf`; raises `HeadError`."""
    if not isinstance(raw.get(_LAYER), Mapping):
        raise HeadError(f"{where}: no {_LAYER!r}; is this the folder of an EAGLE head?")
    layer, top = raw[_LAYER], {key: value for key, value in raw.items() if key not in (_LAYER, "fusion_bias")}
    if raw[SPECULATORS_KIND] == "eagle":
        return {**layer, **top, "bias": bool(raw.get("fusion_bias", False)), "num_hidden_layers": 1}
    if "norm_before_residual" not in raw:
        _warn_of_missing(where)
    vocab = raw.get("draft_vocab_size") or layer.get("vocab_size")
    return {**layer, **top, "bias": False, "draft_vocab_size": vocab}


@cache
def _warn_of_missing(where: str) -> None:
    logger.warning("%s does not say norm_before_residual: false, as the library that writes this layout reads it", where)


def _layer(config: HeadConfig) -> dict[str, Any]:
    layer = config.to_hf()
    rope = layer.pop("rope_parameters")
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    for key in ("bias", "qkv_bias", "layernorms", "draft_vocab_size", "num_aux_hidden_states", AUX_IDS, "target_hidden_size"):
        layer.pop(key, None)
    return {key: value for key, value in layer.items() if key not in NORM_FLAGS} | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.o_bias,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if len(scaling) > 1 or scaling["rope_type"] != "default" else None,
        "tie_word_embeddings": False,
    }


def _eagle1(config: HeadConfig) -> dict[str, Any]:
    return {
        "architectures": ["EagleSpeculator"],
        SPECULATORS_KIND: "eagle",
        "fusion_bias": config.fusion_bias,
        "layernorms": config.layernorms,
        "transformer_layer_architecture": "LlamaDecoderLayer",
    }


def _eagle3(config: HeadConfig) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        SPECULATORS_KIND: "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        AUX_IDS: list(config.aux_layers) or None,
        **{name: getattr(config, name) for name in NORM_FLAGS},
    }


def _how(config: HeadConfig, verifier: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "speculators_config": {
            "algorithm": "eagle3" if config.is_eagle3 else "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": dict(verifier),
        }
    }

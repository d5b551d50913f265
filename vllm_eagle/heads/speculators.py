"""The `speculators` layout of an EAGLE-1 head: the same numbers under other names, the layer's shape in a nested config.

    here                       there
    fc.*                       fusion_fc.*
    layers.0.*                 transformer.*
    bias                       fusion_bias
    everything else            transformer_layer_config.*

Heads with `layernorms` (HASS variants) hold tensors that change arithmetic and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_eagle.errors import HeadError
from vllm_eagle.heads.config import HeadConfig

KIND = "speculators_model_type"
_PREFIXES = (("fc.", "fusion_fc."), ("layers.0.", "transformer."))


def to_there(name: str) -> str:
    """Return the tensor name of the `speculators` layout."""
    return next((there + name.removeprefix(here) for here, there in _PREFIXES if name.startswith(here)), name)


def to_here(name: str) -> str:
    """Return the tensor name of the original layout; inverse of `to_there`."""
    return next((here + name.removeprefix(there) for here, there in _PREFIXES if name.startswith(there)), name)


def config_to_there(config: HeadConfig, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout's `config.json`; `verifier` holds name_or_path and architectures of the target.

    Raises `HeadError` for an EAGLE-3 head, and for one of several layers: the layout has a place for one.
    """
    if config.is_eagle3:
        raise HeadError("the speculators layout is written for EAGLE-1 heads, this one is EAGLE-3; use --layout original")
    if config.num_layers != 1:
        raise HeadError(
            f"the speculators layout holds 1 decoder layer, this head has {config.num_layers}; use --layout original"
        )
    layer = config.to_hf()
    rope = layer.pop("rope_parameters")
    fusion_bias, attention_bias = layer.pop("bias"), layer.pop("qkv_bias")
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    layer |= {
        "attention_bias": attention_bias,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["EagleSpeculator"],
        KIND: "eagle",
        "fusion_bias": fusion_bias,
        "layernorms": False,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": dict(verifier),
        },
    }


def config_to_here(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the original layout's dictionary for `HeadConfig.from_hf`; raises `HeadError` for another kind of head."""
    if raw[KIND] != "eagle":
        raise HeadError(f"{where}: {KIND}={raw[KIND]!r} is not supported (only 'eagle')")
    if raw.get("layernorms"):
        raise HeadError(f"{where}: layernorms=true is not supported for an EAGLE-1 head (only false)")
    if not isinstance(raw.get("transformer_layer_config"), Mapping):
        raise HeadError(f"{where}: no 'transformer_layer_config'; is this the folder of an EAGLE head?")
    return {**raw["transformer_layer_config"], "bias": bool(raw.get("fusion_bias", False)), "num_hidden_layers": 1}

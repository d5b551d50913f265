"""Which keys of a head's `config.json` change what it computes, and which values of them are implemented.

A key nobody knows is let pass where its name sounds harmless, or where it is off. One that sounds like arithmetic is an
error that names it: a head that is computed otherwise than it was trained drafts worse, and nothing else shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from vllm_eagle.errors import HeadError

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""What an EAGLE-3 config may switch on; off where it is absent."""

_READ = {
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "max_sequence_length", "bias", "qkv_bias"),
    *("attention_bias", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "draft_vocab_size"),
    *("target_hidden_size", "num_aux_hidden_states", AUX_IDS, "eagle_config", "layernorms", *NORM_FLAGS),
}
"""Keys that are honoured."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "use_sliding_window": (False,),
    "logit_scale": (1,),
    "transformer_layer_architecture": ("LlamaDecoderLayer", "auto"),
    "eagle_config.use_aux_hidden_state": (True,),
    "eagle_config.use_last_layernorm": (True,),
    "eagle_config.use_input_layernorm_in_first_layer": (True,),
    "eagle_config.use_mtp_layernorm": (False,),
    "eagle_config.parallel_draft_step": (1,),
}
"""Keys that would change arithmetic; only these values, or none, are implemented."""

_IDLE = {
    *("attention_dropout", "hidden_dropout", "max_window_layers", "initializer_range", "layer_norm_eps"),
    *("_attn_implementation", "attn_implementation", "add_cross_attention", "cross_attention_hidden_size", "pruned_heads"),
    *("output_attentions", "chunk_size_feed_forward", "head_type", f"eagle_config.{AUX_IDS}", "eagle_config.layer_ids"),
    *("eagle_config.norm_before_fc", "eagle_config.next_layer_regular", "eagle_config.has_lm_head"),
}
"""Keys that sound like arithmetic and are none, or are read elsewhere."""

_GENERIC = {
    *PretrainedConfig().to_dict(),
    *("model_type", "tie_word_embeddings", "tie_encoder_decoder", "torch_dtype", "use_cache", "auto_map"),
    *("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("speculators_config", "speculators_model_type", "speculators_version"),
}
"""Keys of any model, and what a `speculators` file says about itself."""

_SOUNDS = {
    *("norm", "layernorm", "rmsnorm", "bias", "scale", "scaling", "scalar", "rope", "rotary", "residual", "act", "activation"),
    *("window", "softcap", "softcapping", "multiplier", "attn", "attention", "attentions", "layer", "layers", "quantization"),
    *("mask", "experts", "moe", "lora", "parallel", "logit", "logits", "head", "heads", "mlp", "dim", "hidden"),
    *("eps", "qk", "embedding", "embeddings", "fc", "fusion", "position", "positions"),
}


def check_flags(raw: Mapping[str, Any], kind: str, where: str) -> None:
    """Raise `HeadError` naming `where` and the first key whose value is not implemented, or that may matter and is unknown."""
    nested = raw.get("eagle_config") or {}
    for key, value in (*raw.items(), *((f"eagle_config.{key}", value) for key, value in nested.items())):
        if key in _ONLY and value is not None and value not in _ONLY[key]:
            raise HeadError(f"{where}: {key}={value!r} is not supported for an {kind} head (only {_ONLY[key][0]!r})")
        if _may_matter(key, value):
            raise HeadError(
                f"{where}: {key}={value!r} is unknown and may change what the head computes; remove it if it does not"
            )
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        raise HeadError(f"{where}: sliding_window={raw['sliding_window']!r} is not supported for an {kind} head (only None)")
    if others := [layer for layer in raw.get("layer_types") or () if layer != "full_attention"]:
        raise HeadError(f"{where}: layer_types names {others[0]!r}, which is not supported for an {kind} head")


def ignored(raw: Mapping[str, Any]) -> list[str]:
    """Return the keys that are there, do nothing, and do not stand in every model's file."""
    return sorted(set(raw) - _READ - set(_ONLY) - _IDLE - _GENERIC - {"sliding_window", "layer_types"})


def _may_matter(key: str, value: Any) -> bool:
    known = key in _READ or key in _ONLY or key in _IDLE or key in _GENERIC or key in ("sliding_window", "layer_types")
    off = value is None or value is False or value in ([], {}, 0, "")
    return not known and not off and bool(_SOUNDS & set(re.split(r"[._]", key.lower())))

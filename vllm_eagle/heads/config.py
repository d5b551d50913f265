"""What a head's `config.json` says, in one frozen type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_eagle.errors import HeadError

AUX_STATES = 3
"""States of the target an EAGLE-3 head reads: of a low, a middle and a high layer."""

_EAGLE3 = "LlamaForCausalLMEagle3"

# Keys of a head's config that would change arithmetic if honoured; only these values are implemented.
_FIXED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "norm_before_residual": None,
    "norm_output": None,
    "norm_before_fc": None,
    "fc_norm": None,
}


@dataclass(frozen=True)
class HeadConfig:
    """Describe a head in its original layout.

    An EAGLE-1/2 config is a plain Llama config that nowhere says "EAGLE"; an EAGLE-3 config has a draft vocabulary.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    fusion_bias: bool
    qkv_bias: bool
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] = ()

    @property
    def is_eagle3(self) -> bool:
        """Tell EAGLE-3 from EAGLE-1/2."""
        return self.draft_vocab_size is not None

    @property
    def kind(self) -> str:
        """Return what messages call such a head."""
        return "EAGLE-3" if self.is_eagle3 else "EAGLE-1"

    def states_read(self, target_layers: int) -> tuple[int, ...]:
        """Return the layers of the target whose inputs are read; none for EAGLE-1, which reads what the LM head reads."""
        return self.aux_layers or (default_aux_layers(target_layers) if self.is_eagle3 else ())

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> HeadConfig:
        """Read a Hugging Face style dictionary; absent keys take the meaning they have in released heads.

        Raises `HeadError` naming `where` for a missing key or a flag that would change arithmetic.
        """
        eagle3 = raw.get("draft_vocab_size") is not None or _EAGLE3 in (raw.get("architectures") or ())
        for key, only in _FIXED.items():
            if raw.get(key, only) not in (only, None, False):
                kind = "EAGLE-3" if eagle3 else "EAGLE-1"
                raise HeadError(f"{where}: {key}={raw[key]!r} is not supported for an {kind} head (only {only!r})")
        try:
            hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
            intermediate, vocab = int(raw["intermediate_size"]), int(raw["vocab_size"])
        except KeyError as missing:
            raise HeadError(f"{where}: no {missing.args[0]!r}; is this the folder of an EAGLE head?") from None
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_layers=int(raw.get("num_hidden_layers", 1)),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=vocab,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings") or raw.get("max_sequence_length") or 2048),
            fusion_bias=bool(raw.get("bias", not eagle3)),
            qkv_bias=bool(raw.get("qkv_bias", raw.get("attention_bias", False))),
            rope=_rope(raw),
            **(_eagle3_part(raw, where) if eagle3 else {}),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the dictionary that `from_hf` reads back to an equal value."""
        own = {
            "draft_vocab_size": self.draft_vocab_size,
            "num_aux_hidden_states": AUX_STATES,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
        }
        return {
            "architectures": [_EAGLE3 if self.is_eagle3 else "LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "tie_word_embeddings": not self.is_eagle3,
            "bias": self.fusion_bias,
            "qkv_bias": self.qkv_bias,
            "rope_parameters": dict(self.rope),
            **(own if self.is_eagle3 else {}),
        }


def default_aux_layers(target_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 head reads when nobody says otherwise: 2, n//2, n-3 of n layers.

    With fewer than seven layers these would meet, and make room for each other; raises `HeadError` below three.
    """
    if target_layers < AUX_STATES:
        raise HeadError(f"the target has {target_layers} layers, EAGLE-3 reads {AUX_STATES}; name them, such as 0,1,1")
    middle = target_layers // 2
    return min(2, middle - 1), middle, max(target_layers - 3, middle + 1)


def _eagle3_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read what only an EAGLE-3 config says; layer ids are taken as they are, at top level or in `eagle_config`."""
    hidden, nested = raw["hidden_size"], raw.get("eagle_config") or {}
    for key, only in {"num_hidden_layers": 1, "target_hidden_size": hidden, "num_aux_hidden_states": AUX_STATES}.items():
        if raw.get(key) not in (only, None):
            raise HeadError(f"{where}: {key}={raw[key]!r} is not supported for an EAGLE-3 head (only {only!r})")
    name = "eagle_aux_hidden_state_layer_ids"
    layers = tuple(map(int, raw.get(name) or nested.get(name) or nested.get("layer_ids") or ()))
    if len(layers) not in (0, AUX_STATES):
        raise HeadError(f"{where}: {name}={list(layers)} must name {AUX_STATES} layers of the target")
    return {"draft_vocab_size": int(raw.get("draft_vocab_size") or raw["vocab_size"]), "aux_layers": layers}


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read rotary settings in both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    merged: dict[str, Any] = {"rope_type": "default", "rope_theta": float(raw.get("rope_theta") or 10000.0)}
    merged.update(raw.get("rope_scaling") or {})
    merged.update(raw.get("rope_parameters") or {})
    merged["rope_type"] = merged.pop("type", merged["rope_type"])
    return merged

"""What a head's `config.json` says, in one frozen type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_eagle.errors import HeadError

# Keys of an EAGLE-1 config that would change arithmetic if honoured; only these values are implemented.
_FIXED = {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "norm_before_residual": None, "norm_output": None}


@dataclass(frozen=True)
class HeadConfig:
    """Describe an EAGLE-1/2 head (original layout: a plain Llama config that nowhere says "EAGLE")."""

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

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> HeadConfig:
        """Read a Hugging Face style dictionary; absent keys take the meaning they have in released heads.

        Raises `HeadError` naming `where` for a missing key or a flag that would change arithmetic.
        """
        for key, only in _FIXED.items():
            if raw.get(key, only) not in (only, None, False):
                raise HeadError(f"{where}: {key}={raw[key]!r} is not supported for an EAGLE-1 head (only {only!r})")
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
            fusion_bias=bool(raw.get("bias", True)),
            qkv_bias=bool(raw.get("qkv_bias", raw.get("attention_bias", False))),
            rope=_rope(raw),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the dictionary that `from_hf` reads back to an equal value."""
        return {
            "architectures": ["LlamaForCausalLM"],
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
            "tie_word_embeddings": True,
            "bias": self.fusion_bias,
            "qkv_bias": self.qkv_bias,
            "rope_parameters": dict(self.rope),
        }


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read rotary settings in both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    merged: dict[str, Any] = {"rope_type": "default", "rope_theta": float(raw.get("rope_theta") or 10000.0)}
    merged.update(raw.get("rope_scaling") or {})
    merged.update(raw.get("rope_parameters") or {})
    merged["rope_type"] = merged.pop("type", merged["rope_type"])
    return merged

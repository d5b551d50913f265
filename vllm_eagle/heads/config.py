"""What a head's `config.json` says, in one frozen type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_eagle.errors import HeadError
from vllm_eagle.heads.flags import AUX_IDS, NORM_FLAGS, check_flags
from vllm_eagle.heads.rope import read_rope

AUX_STATES = 3
"""States of the target an EAGLE-3 head reads: of a low, a middle and a high layer."""

_EAGLE3 = "LlamaForCausalLMEagle3"


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
    o_bias: bool = False
    layernorms: bool = False
    """Of EAGLE-1 (HASS): norms on the embedding, before the layer's attention and before the LM head."""
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] = ()
    num_aux: int = AUX_STATES
    """States of the target that an EAGLE-3 head reads."""
    target_hidden_size: int | None = None
    """Width of such a state, None where it is the head's own."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    """Whether the folder holds an embedding; no key of `config.json` says so."""

    @property
    def is_eagle3(self) -> bool:
        """Tell EAGLE-3 from EAGLE-1/2."""
        return self.draft_vocab_size is not None

    @property
    def kind(self) -> str:
        """Return what messages call such a head."""
        return "EAGLE-3" if self.is_eagle3 else "EAGLE-1"

    @property
    def target_size(self) -> int:
        """Return the target's hidden size."""
        return self.target_hidden_size or self.hidden_size

    def states_read(self, target_layers: int) -> tuple[int, ...]:
        """Return the layers of the target whose inputs are read; none for EAGLE-1, which reads what the LM head reads.

        Raises `HeadError` where the head does not say, and there is no usual answer.
        """
        if self.aux_layers or not self.is_eagle3:
            return self.aux_layers
        if self.num_aux != AUX_STATES:
            raise HeadError(f"the head reads {self.num_aux} layers and does not say which; name them with aux_layers")
        return default_aux_layers(target_layers)

    def reading(self, aux_layers: Sequence[int] | None) -> HeadConfig:
        """Return the same head reading other layers of the target, None for those it names itself; raises `HeadError`."""
        if aux_layers is None:
            return self
        if not self.is_eagle3:
            raise HeadError("aux_layers has no effect on an EAGLE-1 head, which reads what the LM head reads; remove it")
        if len(aux_layers) != self.num_aux:
            raise HeadError(f"aux_layers={list(aux_layers)} must name {self.num_aux} layers of the target")
        return replace(self, aux_layers=tuple(aux_layers))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> HeadConfig:
        """Read a Hugging Face style dictionary; absent keys take the meaning they have in released heads.

        Raises `HeadError` naming `where` for a missing key or a flag that would change arithmetic.
        """
        eagle3 = is_eagle3(raw)
        check_flags(raw, "EAGLE-3" if eagle3 else "EAGLE-1", where)
        try:
            hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
            intermediate, vocab = int(raw["intermediate_size"]), int(raw["vocab_size"])
        except KeyError as missing:
            raise HeadError(f"{where}: no {missing.args[0]!r}; is this the folder of an EAGLE head?") from None
        bias = bool(raw.get("attention_bias"))
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
            qkv_bias=bool(raw.get("qkv_bias", bias)),
            o_bias=bias,
            rope=read_rope(raw, where),
            **(_eagle3_part(raw, where) if eagle3 else _eagle1_part(raw, where)),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the dictionary that `from_hf` reads back to an equal value."""
        own = {
            "draft_vocab_size": self.draft_vocab_size,
            "num_aux_hidden_states": self.num_aux,
            AUX_IDS: list(self.aux_layers),
            **({"target_hidden_size": self.target_hidden_size} if self.target_hidden_size else {}),
            **{name: True for name in NORM_FLAGS if getattr(self, name)},
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
            **({"attention_bias": True} if self.o_bias else {}),
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


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Tell from a head's dictionary whether it is an EAGLE-3 head."""
    return raw.get("draft_vocab_size") is not None or any("Eagle3" in name for name in raw.get("architectures") or ())


def _eagle1_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in (*NORM_FLAGS, "target_hidden_size"):
        if raw.get(key) and raw[key] != raw["hidden_size"]:
            raise HeadError(f"{where}: {key}={raw[key]!r} is not supported for an EAGLE-1 head")
    return {"layernorms": bool(raw.get("layernorms"))}


def _eagle3_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read what only an EAGLE-3 config says; layer ids are taken as they are, at top level or in `eagle_config`."""
    nested = raw.get("eagle_config") or {}
    if raw.get("layernorms"):
        raise HeadError(f"{where}: layernorms={raw['layernorms']!r} is not supported for an EAGLE-3 head")
    layers = tuple(map(int, raw.get(AUX_IDS) or nested.get(AUX_IDS) or nested.get("layer_ids") or ()))
    count = int(raw.get("num_aux_hidden_states") or len(layers) or AUX_STATES)
    if len(layers) not in (0, count):
        raise HeadError(f"{where}: {AUX_IDS}={list(layers)} must name {count} layers of the target")
    flags = {name: bool(raw.get(name, nested.get(name, False))) for name in NORM_FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise HeadError(f"{where}: norm_before_fc and fc_norm exclude each other; a head has one of the two")
    wide = int(raw.get("target_hidden_size") or raw["hidden_size"])
    return {
        "draft_vocab_size": int(raw.get("draft_vocab_size") or raw["vocab_size"]),
        "aux_layers": layers,
        "num_aux": count,
        "target_hidden_size": None if wide == raw["hidden_size"] else wide,
        **flags,
    }

"""Say what a folder holds, what of it changes arithmetic, and whether it fits a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_eagle.errors import HeadError
from vllm_eagle.heads.checkpoint import Checkpoint, load_head
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.flags import NORM_FLAGS, ignored
from vllm_eagle.heads.target import TargetShape, misfits
from vllm_eagle.heads.weights import files_of


@dataclass(frozen=True)
class Inspection:
    """Hold a report, and everything that keeps the head from drafting for the target."""

    lines: Sequence[str]
    troubles: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def inspect(found: Checkpoint, name: str, target: TargetShape | None, aux_layers: Sequence[int] | None = None) -> Inspection:
    """Look at a head that is called `name`; its numbers are read only if nothing is wrong before. Raises `HeadError`."""
    config = found.config.reading(aux_layers)
    troubles = _troubles(found)
    if target is not None:
        troubles += misfits(config, name, target)
    rows = [
        ("files", _files(found)),
        ("layers", _layers(config)),
        *_reading(config, target),
        ("embedding", "its own, unless the target's is the same" if config.own_embedding else "the target's"),
        ("positions", f"{config.max_positions}, rotary {_settings(config.rope)}"),
        ("arithmetic", ", ".join(_arithmetic(config))),
        ("tensors", _tensors(found)),
        ("not read", ", ".join(ignored(found.raw)) or "nothing of config.json"),
    ]
    lines = [f"{config.kind} head, {found.layout.name} layout: {name}", *(f"  {what:<11} {text}" for what, text in rows)]
    lines += [f"  wrong       {trouble}" for trouble in troubles]
    if target is not None:
        lines.append(f"fits {target.name}: {'no' if troubles else 'yes'}")
    if not troubles:
        lines += _serving(config, name, target, aux_layers)
    return Inspection(lines, troubles)


def _troubles(found: Checkpoint) -> list[str]:
    try:
        found.check()
        load_head(found.folder, None)
    except HeadError as bad:
        return [str(bad)]
    return []


def _files(found: Checkpoint) -> str:
    tensors = found.tensors.values()
    numbers, size = sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)
    kinds = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point())
    names = ", ".join(path.name for path in files_of(found.folder))
    return f"{names}: {len(found.tensors)} tensors, {numbers:,} numbers, {_bytes(size)}, {' and '.join(kinds)}"


def _bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def _layers(config: HeadConfig) -> str:
    return (
        f"{config.num_layers}, hidden size {config.hidden_size}, feed-forward {config.intermediate_size},"
        f" {config.num_heads} heads over {config.num_kv_heads} of keys, {config.head_dim} wide;"
        f" {2 * config.num_layers * config.num_kv_heads * config.head_dim:,} numbers of K/V cache per token"
    )


def _reading(config: HeadConfig, target: TargetShape | None) -> Iterable[tuple[str, str]]:
    if not config.is_eagle3:
        yield "reads", f"what the target's LM head reads, {config.target_size} wide"
        yield "drafts", f"{config.vocab_size} tokens, or those of a draft_vocab.json, by the target's LM head"
        return
    layers = list(config.aux_layers) or "not named: 2, n/2 and n-3 of n"
    if target is not None and not config.aux_layers and config.num_aux == 3 and target.layers >= 3:
        layers = f"{list(config.states_read(target.layers))}, the usual ones of {target.layers}"
    yield "reads", f"inputs of {config.num_aux} layers of the target, {config.target_size} wide: {layers}"
    yield "drafts", f"{config.draft_vocab_size} of {config.vocab_size} tokens, by an LM head of its own"


def _settings(rope: object) -> str:
    assert isinstance(rope, dict)
    others = [f"{key} {value}" for key, value in rope.items() if key != "rope_type"]
    return f"{rope['rope_type']} ({', '.join(others)})"


def _arithmetic(config: HeadConfig) -> Iterable[str]:
    flags = NORM_FLAGS if config.is_eagle3 else ("layernorms",)
    biases = {"bias of fc": config.fusion_bias, "of q, k, v": config.qkv_bias, "of o_proj": config.o_bias}
    yield f"norms' epsilon {config.rms_norm_eps}"
    yield from (f"{flag} {_yes(getattr(config, flag))}" for flag in flags)
    yield from (f"{what} {_yes(on)}" for what, on in biases.items())


def _tensors(found: Checkpoint) -> str:
    used = len(set(found.tensors) & set(found.expected))
    return f"{used} used; unused: {', '.join(found.unused()) or 'none'}; missing: {', '.join(found.missing()) or 'none'}"


def _serving(config: HeadConfig, name: str, target: TargetShape | None, aux_layers: Sequence[int] | None) -> Iterable[str]:
    flags = f" --speculative-aux-layers {','.join(map(str, aux_layers))}" if aux_layers else ""
    yield f"serve it: vllm serve {target.name if target else 'TARGET'} --speculative-model {name}{flags}"
    if target is not None and target.max_positions and target.max_positions > config.max_positions:
        yield f"requests longer than {config.max_positions} tokens go on without drafts: the head has no more positions"


def _yes(on: bool) -> str:
    return "yes" if on else "no"

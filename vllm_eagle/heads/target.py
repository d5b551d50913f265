"""What a head must know of the model it drafts for, and whether the two fit: sizes, vocabulary and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_eagle.errors import EagleError, HeadError
from vllm_eagle.heads.config import HeadConfig


@dataclass(frozen=True)
class TargetShape:
    """Hold the sizes of a target."""

    name: str
    hidden_size: int
    vocab_size: int
    layers: int
    architectures: Sequence[str] = ()
    max_positions: int | None = None

    @classmethod
    def read(cls, model: str) -> TargetShape:
        """Read the configuration of a model's folder, or of its repository on the hub; raises `EagleError`."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model, local_files_only="/" not in model)  # a bare name is a folder
        except (OSError, ValueError) as bad:
            raise EagleError(f"{model}: the target cannot be read ({str(bad).splitlines()[0]})") from None
        text = config.get_text_config()
        return cls(
            name=model,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            layers=text.num_hidden_layers,
            architectures=config.architectures or (),
            max_positions=getattr(text, "max_position_embeddings", None),
        )


def misfits(head: HeadConfig, name: str, target: TargetShape) -> list[str]:
    """Return why the head called `name` cannot draft for `target`; empty where it can."""
    found = []
    try:
        outside = [layer for layer in head.states_read(target.layers) if not 0 <= layer <= target.layers]
    except HeadError as bad:
        return [f"head {name}: {bad}"]
    if outside:
        found.append(f"head {name} reads layer {outside[0]}, target {target.name} has {target.layers}")
    if head.target_size != target.hidden_size:
        found.append(f"head {name} has hidden size {head.target_size}, target {target.name} has {target.hidden_size}")
    if head.vocab_size != target.vocab_size:
        found.append(f"head {name} has a vocabulary of {head.vocab_size}, target {target.name} of {target.vocab_size}")
    return [f"{reason}; it was trained for another target" for reason in found]

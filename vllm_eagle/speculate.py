"""The offline way in: keyword arguments for `vllm.LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_eagle.names import PROPOSER, SCHEDULER, WORKER


def speculate(
    model: str | None = None,
    *,
    tree_size: int | str | None = None,
    tree_depth: int | None = None,
    tree_top_k: int | None = None,
    tree: str | None = None,
    draft_vocab: str | None = None,
    max_context: int | None = None,
    trace: str | None = None,
    aux_layers: Sequence[int] | None = None,
    drafter: str | None = None,
    drafter_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return keyword arguments that make `vllm.LLM(...)` speculate with the EAGLE head `model`, a folder or a hub's OWNER/NAME.

    `tree_size` nodes, or "auto", the default: as many as pay, at most 25; `tree_depth` levels (5); `tree_top_k` nodes expanded
    per level (8); or `tree`, the JSON file of a static tree. `draft_vocab`: JSON file of the tokens worth drafting, or "all".
    `max_context`: longest request drafted for, in tokens (default: the positions the head was made for). `trace`: folder for
    pages about requests that ask for one. `aux_layers`: layers of the target that an EAGLE-3 head reads, where its config.json
    is silent or wrong. `drafter`: dotted path of another drafter class, with its `drafter_options`. Raises `EagleError`.
    """
    from vllm_eagle.config import KEY, Options  # torch is heavy: a process that only imports us must not pay for it

    given = {
        "model": model,
        "tree_size": tree_size,
        "tree_depth": tree_depth,
        "tree_top_k": tree_top_k,
        "tree": tree,
        "draft_vocab": draft_vocab,
        "max_context": max_context,
        "trace": trace,
        "aux_layers": None if aux_layers is None else list(aux_layers),
        "drafter": drafter,
        "drafter_options": drafter_options,
    }
    options = Options.from_mapping({key: value for key, value in given.items() if value is not None})
    return {
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": options.growth().size},
        "additional_config": {KEY: options.to_mapping()},
    }

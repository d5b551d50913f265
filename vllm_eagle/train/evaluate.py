"""Judge a head by itself: acceptance by depth of a chain, on answers it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_eagle.heads import Head
from vllm_eagle.train.batches import PackedBatch, pack
from vllm_eagle.train.features import Example
from vllm_eagle.train.rollout import rollout
from vllm_eagle.train.words import Words

_ROUNDS = 2048  # of one batch


@dataclass(frozen=True)
class Acceptance:
    """Hold, for each depth, how many drafts reached it and how many were right there."""

    drafted: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Return 0-α, 1-α, …: the share right at a depth of those right before it."""
        return tuple(right / max(1, drafted) for drafted, right in zip(self.drafted, self.right, strict=True))

    @property
    def mean_length(self) -> float:
        """Return the mean accepted length of a chain of all depths, the target's own token included."""
        return 1 + sum(self.right) / max(1, self.drafted[0])

    def rounded(self) -> dict[str, object]:
        """Return the figures for a journal."""
        return {"alpha": [round(rate, 4) for rate in self.rates], "chain_length": round(self.mean_length, 3)}


@torch.inference_mode()
def chain_acceptance(head: Head, examples: Sequence[Example], words: Words, depths: int = 5) -> Acceptance:
    """Count a chain draft from every position of the answers: a token counts as right when the target took it."""
    drafted, right = [0] * depths, [0] * depths
    for batch in packed(examples):
        for s, depth in enumerate(rollout(head, batch.to(words.lm_head.device), words, depths, 1, None)):
            drafted[s] += len(depth.rows.index)
            right[s] += int((depth.scores.rank == 0).sum())
    return Acceptance(tuple(drafted), tuple(right))


def packed(examples: Sequence[Example]) -> Iterator[PackedBatch]:
    """Yield all examples in batches of about `_ROUNDS` rounds."""
    group: list[Example] = []
    for example in examples:
        group.append(example)
        if sum(e.answer_length for e in group) >= _ROUNDS:
            yield pack(group)
            group = []
    if group:
        yield pack(group)

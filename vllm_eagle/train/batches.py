"""Packed batches: sequences laid end to end, so nothing is padded and no bucket is needed.

A sequence of T tokens with an answer of A tokens (P = T - A of prompt) gives n = T-2 slots and R = A-1 rounds:

    slot j        0   1   …  P-1     P      …  T-3
    feature       f0  f1  …  f(P-1)  fP     …  f(T-3)
    token ahead   x1  x2  …  xP      x(P+1) …  x(T-2)      sampled from the feature above it
    round i                  0       1      …  R-1         a draft that starts at slot P-1+i

    depth s of round i reads the true token x(P+i+s) beside its own last output (s = 0: beside the true feature),
    sits at position P-1+i+s, and should give f(P+i+s), from which the target chose x(P+1+i+s).

Shapes: `N` slots of all sequences, `R` rounds of all sequences, `K` candidates, `D` hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_eagle.train.features import Example


@dataclass(frozen=True)
class PackedBatch:
    """Hold some sequences end to end; sequence b owns `slots[b]` consecutive slots and `rounds[b]` rounds."""

    slots: tuple[int, ...]
    rounds: tuple[int, ...]
    tokens: Tensor  # [N] one ahead of the feature
    features: Tensor  # [N, D] float32
    positions: Tensor  # [N] of the features
    guides: Tensor  # [N, D] the feature after each slot: what the head should give there
    start: Tensor  # [R] slot of each round's depth 0
    left: Tensor  # [R] depths each round has before its sequence ends, at least 1
    chosen: Tensor  # [R] token the target took after depth 0 of each round
    top_ids: Tensor  # [R, K] its candidates there
    top_probs: Tensor  # [R, K]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same batch on `device`."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def pack(examples: Sequence[Example]) -> PackedBatch:
    """Lay usable examples (an answer of two tokens or more) end to end."""
    slots = tuple(len(e.tokens) - 2 for e in examples)
    rounds = tuple(e.answer_length - 1 for e in examples)
    first = torch.tensor([0, *slots]).cumsum(0).tolist()
    begins = [begin + n - r for begin, n, r in zip(first, slots, rounds, strict=False)]
    return PackedBatch(
        slots=slots,
        rounds=rounds,
        tokens=torch.cat([e.tokens[1:-1] for e in examples]),
        features=torch.cat([e.features[:-1] for e in examples]).float(),
        positions=torch.cat([torch.arange(n) for n in slots]),
        guides=torch.cat([e.features[1:] for e in examples]).float(),
        start=torch.cat([torch.arange(b, b + r) for b, r in zip(begins, rounds, strict=True)]),
        left=torch.cat([torch.arange(r, 0, -1) for r in rounds]),
        chosen=torch.cat([e.tokens[e.prompt_length + 1 :] for e in examples]),
        top_ids=torch.cat([e.top_ids[1:] for e in examples]),
        top_probs=torch.cat([e.top_probs[1:] for e in examples]).float(),
    )


@dataclass(frozen=True)
class Share:
    """Hold one process's numbered batches of a step, and the rounds of the whole step over all processes."""

    batches: Sequence[tuple[int, PackedBatch]]
    rounds: int


@dataclass(frozen=True)
class Sampler:
    """Give the batches of every epoch; the order follows from `seed` and the epoch alone, so it needs no state."""

    examples: Sequence[Example]
    batch_rounds: int
    seed: int

    def epoch(self, number: int) -> list[list[int]]:
        """Return the epoch's batches as lists of example numbers, each of about `batch_rounds` rounds."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + number)
        batches: list[list[int]] = [[]]
        size = 0
        for index in torch.randperm(len(self.examples), generator=generator).tolist():
            if size >= self.batch_rounds:
                batches.append([])
                size = 0
            batches[-1].append(index)
            size += self.examples[index].answer_length - 1
        return batches

    def from_step(self, step: int) -> Iterator[PackedBatch]:
        """Yield batches without end, as if `step` of them had been yielded before."""
        return map(self._pack, self._from(step))

    def shares(self, step: int, accumulate: int, process: int, processes: int) -> Iterator[Share]:
        """Yield the parts of `process` in steps of `accumulate` batches for each process, from `step` on.

        Batches are dealt out in turn, so the union over processes is what one process with all of them would see.
        """
        size = accumulate * processes
        order = self._from(step * size)
        while True:
            group = list(itertools.islice(order, size))
            rounds = sum(self.examples[i].answer_length - 1 for batch in group for i in batch)
            mine = [(step * size + at, self._pack(group[at])) for at in range(process, size, processes)]
            yield Share(mine, rounds)
            step += 1

    def _pack(self, batch: Sequence[int]) -> PackedBatch:
        return pack([self.examples[i] for i in batch])

    def _from(self, step: int) -> Iterator[list[int]]:
        number = 0
        while True:
            batches = self.epoch(number)
            yield from batches[step:]
            step, number = max(0, step - len(batches)), number + 1


def usable(example: Example) -> bool:
    """Tell whether an example holds at least one round."""
    return example.answer_length >= 2 and len(example.tokens) >= 3


def split(examples: Sequence[Example], held_out_percent: int) -> tuple[list[Example], list[Example]]:
    """Split into training and held-out examples by a hash of the prompt: a prompt's answers never end on both sides."""
    train: list[Example] = []
    held: list[Example] = []
    for example in filter(usable, examples):
        prompt = example.tokens[: example.prompt_length]
        mixed = int((prompt * torch.arange(1, len(prompt) + 1)).sum()) * 2_654_435_761 % 2**32
        (held if mixed % 100 < held_out_percent else train).append(example)
    return train, held

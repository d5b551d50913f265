"""Shared noise: rank drafts with the very noise the target will draw with.

At temperature T vLLM takes argmax(logits / T + g) with Gumbel noise g that follows from one integer per token, drawn from
the request's generator. Those integers can be read ahead from a copy of the generator. A drafter whose logits are near the
target's then nearly always ranks the target's own draw first, where a drafter without the noise is right only as often as
two independent draws agree. The output cannot change: the noise is the one plain decoding draws.

Shapes: `R` requests, `d` tokens ahead, `F` frontier nodes of a request, `V` draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """Say what the target will draw its next tokens with."""

    temperatures: Tensor  # [R] float32, 0 where the target takes its best token
    seeds: Tensor  # [R, d] int64, ignored where the temperature is 0

    def of(self, requests: Tensor) -> Draws:
        """Return the draws of some requests [R'] (indices)."""
        return Draws(self.temperatures[requests], self.seeds[requests])

    def scores(self, logits: Tensor, tokens: Tensor, level: int) -> Tensor:
        """Return scores [R, F, V] from draft logits [R, F, V] of `tokens` [V]; the target's draw at `level` tends to the best.

        `level` 0 are the children of the root.
        """
        random = self.temperatures > 0
        scale = torch.where(random, self.temperatures, 1.0).reciprocal()
        noise = torch.where(random[:, None], gumbel(self.seeds[:, level], tokens), 0.0)  # [R, V]
        return logits * scale[:, None, None] + noise[:, None]


def peek(generator: torch.Generator, ahead: int) -> Tensor:
    """Return the integers [ahead] the engine will draw next from `generator`, which stays where it is."""
    copy = generator.clone_state()
    return torch.cat([torch.randint(0, 2**31, (1,), generator=copy, dtype=torch.long) for _ in range(ahead)])


def gumbel(seeds: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise [R, V] (float32) of vLLM's CPU sampler for seeds [R] and tokens [V].

    Each (seed, token) has its own 53 random bits, by two rounds of SplitMix64 (Steele, Lea, Flood 2014).
    """
    state = _mix(seeds)[:, None] + (tokens + 1) * _signed(0x9E3779B97F4A7C15)
    uniform = (_shifted(_mix(state), 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform)).float()


def _mix(z: Tensor) -> Tensor:
    """Finish SplitMix64 on int64 tensors that hold unsigned 64-bit numbers; products wrap around."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned

"""Check a head's drafting against the paper's loop while it serves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_eagle.drafting import Draws, HeadCache, HeadDrafter, Known
from vllm_eagle.drafting.reference import next_feature
from vllm_eagle.heads import Head
from vllm_eagle.tree import CandidatePool, DraftTree


class CheckedDrafter(HeadDrafter):
    """Draft as `HeadDrafter` does, and compare every expanded node with the reference loop.

    `worst[d]` is the largest difference of draft logits seen at depth d (0 is the root), `checked[d]` the nodes compared.
    """

    def __init__(
        self, inner: HeadDrafter, plain: Head, embed: Callable[[Tensor], Tensor], logits: Callable[[Tensor], Tensor]
    ) -> None:
        """`plain` holds the same weights as the drafter's head; `logits` maps features [n, D] to [n, V]."""
        super().__init__(inner.head, inner.embed, inner.candidates, inner.growth)
        self.plain, self.plain_embed, self.logits = plain, embed, logits
        self.features: dict[str, list[Tensor]] = {}
        self.worst: dict[int, float] = {}
        self.checked: dict[int, int] = {}

    def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
        """See `Drafter`; target features are collected request by request."""
        for request, features in zip(known.request_ids, torch.split(known.features, known.lengths.tolist()), strict=True):
            self.features.setdefault(request, []).append(features.clone())
        self._now = [r for r, room in enumerate(known.rooms) if room > 0]
        self._known = known
        self._own: dict[int, dict[tuple[int, ...], Tensor]] = {}  # the reference's own features, by path
        return super().draft(known, cache)

    def _offer(self, pool: CandidatePool, features: Tensor, draws: Draws | None) -> None:
        """Compare the frontier's features [R, F, D] before its candidates are taken."""
        for row, r in enumerate(self._now):
            target = torch.cat(self.features[self._known.request_ids[r]])
            tokens = torch.from_numpy(self._known.histories[r]).long()
            own = self._own.setdefault(row, {})
            for slot, candidate in enumerate(pool.frontier[row].tolist()):
                path = pool.path(row, candidate)
                above = [own[tuple(path[:depth])] for depth in range(len(path))]
                guessed = torch.stack(above) if above else features[row, :0]
                own[tuple(path)] = want = next_feature(self.plain, self.plain_embed, target, tokens, path, guessed)
                gap = (self.logits(want[None]) - self.logits(features[row, slot][None])).abs().max().item()
                self.worst[len(path)] = max(self.worst.get(len(path), 0.0), gap)
                self.checked[len(path)] = self.checked.get(len(path), 0) + 1
        super()._offer(pool, features, draws)

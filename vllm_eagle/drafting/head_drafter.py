"""Draft with an EAGLE head: one pass over what became certain, then one pass per level over all trees.

Shapes: `R` requests, `T` newly known positions, `F` frontier nodes of a request, `S` scratch rows of a request,
`D` hidden, `H` heads, `G` K/V heads, `K` head size, `k` candidates of a node, `V` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm_eagle.drafting.base import HeadCache, Known, Pricing
from vllm_eagle.drafting.candidates import DraftVocabulary
from vllm_eagle.drafting.noise import Draws
from vllm_eagle.heads import AnyHead
from vllm_eagle.tree import CandidatePool, DraftTree, Growth


class HeadDrafter:
    """Grow trees from the head's own probabilities."""

    def __init__(
        self,
        head: AnyHead,
        embed: Callable[[Tensor], Tensor],
        candidates: DraftVocabulary,
        growth: Growth,
        pricing: Pricing | None = None,
    ) -> None:
        """`embed` maps tokens [n] to [n, D]; `candidates` read tokens out of the head's features."""
        self.head, self.embed, self.candidates, self.growth, self.pricing = head, embed, candidates, growth, pricing

    def draft(self, known: Known, cache: HeadCache) -> list[DraftTree]:
        """Return one tree per request, each cut to its room, and to what pays."""
        if self.pricing is not None:
            self.pricing.begin(len(known.positions))
        fused = self.head.fuse(known.features)  # [T, D]
        embeddings, ends = self.embed(known.next_tokens), known.ends.to(known.positions.device)
        predicted = self.head(embeddings, fused, known.positions, cache.attend_known, ends)  # [R, D]
        chosen = [r for r, room in enumerate(known.rooms) if room > 0]  # the rest: K/V written, no tree
        drafting = torch.tensor(chosen, device=known.positions.device)
        trees = [DraftTree.build([root], [-1]) for root in known.roots.tolist()]
        if chosen:
            last = known.positions[ends[chosen]]
            level = _Level(self.head, self.growth, cache, drafting, last, predicted.dtype)
            draws = None if known.draws is None else known.draws.of(drafting)
            grown, values = self._grow(predicted[chosen], known.next_tokens[ends[chosen]], level, draws)
            sizes = [self.growth.size] * len(grown)
            if self.pricing is not None:
                depths = np.stack([tree.depths[1:] for tree in grown])
                sizes = self.pricing.choose(values.exp().numpy(), depths, len(trees) - len(grown))
            for r, tree, size in zip(chosen, grown, sizes, strict=True):
                trees[r] = tree.prefix(min(size, known.rooms[r]))
        return trees

    def _grow(self, features: Tensor, roots: Tensor, level: _Level, draws: Draws | None) -> tuple[list[DraftTree], Tensor]:
        """Grow the trees of some requests from the features predicted for their roots [R, D]; log values [R, N] beside them."""
        pool = CandidatePool(self.growth, len(roots), roots.device)
        parents = features.unsqueeze(1)  # [R, F, D] predicted features of the frontier: the root's
        self._offer(pool, parents, draws)
        for depth in range(1, self.growth.depth):
            tokens, slots = pool.expand()
            if self.pricing is not None and not self.pricing.deeper(depth, pool.values.exp().numpy()):
                break
            parents = parents.gather(1, slots.unsqueeze(-1).expand(-1, -1, parents.shape[-1]))  # [R, F, D]
            parents = level.step(self.embed(tokens.reshape(-1)), parents, slots)
            self._offer(pool, parents, draws)
        return pool.trees(roots)

    def _offer(self, pool: CandidatePool, features: Tensor, draws: Draws | None) -> None:
        """Give the pool the best children of every frontier node, from its predicted feature [R, F, D]."""
        requests, frontier, _ = features.shape
        tokens, logprobs = self.candidates(features.flatten(0, 1), self.growth.top_k, draws, pool.level)
        guesses = logprobs.clamp(max=0.0).exp()
        if self.pricing is not None:
            logprobs = torch.from_numpy(self.pricing.calibrate(guesses.numpy(), pool.level)).log()
        pool.add(*(x.view(requests, frontier, -1) for x in (tokens, logprobs, guesses)))


class _Level:
    """Run the frontier through the head, its K/V in scratch: nothing of a guess enters the paged cache."""

    def __init__(
        self, head: AnyHead, growth: Growth, cache: HeadCache, drafting: Tensor, last: Tensor, dtype: torch.dtype
    ) -> None:
        """`last` [R]: the last certain position; a node of level d is paired with the feature of position last + d."""
        config, requests = head.config, len(last)
        self.head, self.cache, self.drafting, self.last, self.stride = head, cache, drafting, last, growth.scratch
        shape = (config.num_layers, requests, self.stride, config.num_kv_heads, config.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=last.device) for _ in range(2))
        self.words = torch.zeros(
            requests, 1, dtype=torch.int64, device=last.device
        )  # [R, F] ancestors of the frontier, in scratch rows
        self.used = self.depth = 0

    def step(self, embeddings: Tensor, features: Tensor, slots: Tensor) -> Tensor:
        """Return predicted features [R, F, D] of nodes with embeddings [R*F, D], their parents' features [R, F, D].

        `slots` [R, F] is each node's parent in the previous frontier.
        """
        requests, width, _ = features.shape
        ones = torch.ones(width, dtype=torch.int64, device=slots.device)
        mine = ones << torch.arange(self.used, self.used + width, device=slots.device)
        self.words = self.words.gather(1, slots) | mine
        self.depth += 1
        positions = (self.last + self.depth).repeat_interleave(width)
        rows = self.cache.level_rows(self.drafting, self.words, self.stride)
        here = slice(self.used, self.used + width)
        self.used += width

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[layer, :, here] = key.view(requests, width, *key.shape[1:])
            self.values[layer, :, here] = value.view(requests, width, *value.shape[1:])
            return self.cache.attend_level(layer, query, self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1), rows)

        return self.head(embeddings, features.flatten(0, 1), positions, attend).view(requests, width, -1)  # type: ignore[no-any-return]

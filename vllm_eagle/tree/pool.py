"""The candidates of one drafting step, for all requests at once.

Shapes: `R` requests, `F` frontier nodes, `k` candidates of a node, `P` candidates of a request so far, `N` kept.
Frontier slot 0 of level 1 is the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_eagle.tree.draft_tree import DraftTree
from vllm_eagle.tree.growth import Growth


class CandidatePool:
    """Collect candidates level by level and hand out the next frontier; at the end, the trees."""

    def __init__(self, growth: Growth, requests: int, device: torch.device | None = None) -> None:
        self.growth = growth
        self.level = 0
        self.frontier = torch.full((requests, 1), -1, device=device)  # [R, F] pool index of each frontier node, -1 for the root
        self._value = torch.zeros(requests, 1, device=device)  # [R, F] log path value of each frontier node
        self._tokens: list[Tensor] = []
        self._values: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._guesses: list[Tensor] = []
        self._size = self._start = self._width = 0

    def add(self, tokens: Tensor, logprobs: Tensor, guesses: Tensor) -> None:
        """Take the best `k` children of every frontier node: tokens [R, F, k], log-probabilities [R, F, k] to rank by.

        `guesses` [R, F, k] are the head's own probabilities, which stay with the nodes.
        """
        requests, _, self._width = tokens.shape
        # A probability is at most 1; rounding must not make a child worth more than its parent.
        values = self._value.unsqueeze(-1) + logprobs.clamp(max=0.0)
        self.level += 1
        self._start = self._size
        self._tokens.append(tokens.reshape(requests, -1))
        self._values.append(values.reshape(requests, -1))
        self._guesses.append(guesses.reshape(requests, -1))
        self._parents.append(self.frontier.repeat_interleave(self._width, dim=1))
        self._size += self._tokens[-1].shape[1]

    def expand(self) -> tuple[Tensor, Tensor]:
        """Choose the next frontier; returns its tokens [R, F'] and the frontier slot of each one's parent [R, F']."""
        chosen = self.growth.expand(self.level, self._values[-1])
        self.frontier = chosen + self._start
        self._value = self._values[-1].gather(1, chosen)
        return self._tokens[-1].gather(1, chosen), chosen // self._width

    def path(self, request: int, candidate: int) -> list[int]:
        """Return the tokens from below the root down to a candidate (pool index; -1, the root, has none)."""
        found: list[int] = []
        if candidate < 0:
            return found
        tokens, parents = torch.cat(self._tokens, 1)[request], torch.cat(self._parents, 1)[request]
        while candidate >= 0:
            found.append(int(tokens[candidate]))
            candidate = int(parents[candidate])
        return found[::-1]

    @property
    def values(self) -> Tensor:
        """Return the log path values [R, F] of the frontier."""
        return self._value

    def trees(self, roots: Tensor) -> tuple[list[DraftTree], Tensor]:
        """Keep what the policy keeps: trees, and the log path values [R, N] of their nodes.

        `roots` [R] are the certain tokens the trees hang from.
        """
        tokens, parents, values = torch.cat(self._tokens, 1), torch.cat(self._parents, 1), torch.cat(self._values, 1)  # [R, P]
        kept = self.growth.keep(values)  # [R, N]
        requests, nodes = kept.shape
        rows = torch.arange(1, nodes + 1, device=kept.device).expand(requests, -1)
        # column 0 is the root's, row 0
        row_of = torch.zeros(requests, tokens.shape[1] + 1, dtype=torch.long, device=kept.device)
        row_of.scatter_(1, kept + 1, rows)
        parent = row_of.gather(1, parents.gather(1, kept) + 1)  # [R, N] rows
        guesses = torch.cat(self._guesses, 1).gather(1, kept)
        host = (x.cpu() for x in (roots, tokens.gather(1, kept), parent, guesses))
        return _assemble(*host), values.gather(1, kept)


def _assemble(roots: Tensor, tokens: Tensor, parent: Tensor, guesses: Tensor) -> list[DraftTree]:
    """Derive depths and ancestor words by walking all rows up together, once per level."""
    requests, nodes = tokens.shape
    all_tokens = torch.cat((roots.unsqueeze(1), tokens), 1)  # [R, 1+N]
    up = torch.cat((torch.zeros(requests, 1, dtype=torch.long), parent), 1)  # [R, 1+N], the root points to itself
    bits = (torch.ones(1, dtype=torch.long) << torch.arange(nodes + 1)).expand(requests, -1)
    depths, words, here = torch.zeros_like(up), bits.clone(), up.clone()
    here[:, 0] = 0
    at = torch.arange(nodes + 1).expand(requests, -1)
    while bool((at != 0).any()):
        depths += at != 0
        words |= bits.gather(1, here)
        at, here = here, up.gather(1, here)
    parents = up.clone()
    parents[:, 0] = -1
    own = torch.cat((torch.ones(requests, 1), guesses), 1)
    columns = (all_tokens.int().numpy(), parents.int().numpy(), depths.int().numpy(), words.numpy(), own.float().numpy())
    return [DraftTree(*(column[r] for column in columns)) for r in range(requests)]

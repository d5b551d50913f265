"""Run a head on its own outputs for several depths, for all rounds of a packed batch at once (training-time test).

    a round of depth s sees      true features of slots up to its start      (keys of the pass over all slots)
                                 its own depths 1 … s                        (its own keys: "diagonal", EAGLE-3 sec. 3)

Shapes: `N` slots, `R` rounds, `L` rounds of one sequence, `n` slots of one sequence, `H` heads, `G` K/V heads,
`Q` = H/G queries of a K/V head, `K` head size, `D` hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_eagle.train.batches import PackedBatch


@dataclass
class SlotAttention:
    """Attend causally within each sequence and keep the keys and values of the pass for the rounds."""

    slots: Sequence[int]
    keys: list[Tensor] = field(default_factory=list)  # by layer: [N, G, K]
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from query [N, H, K] to key and value [N, G, K] of the same sequence; return [N, H, K]."""
        assert len(self.keys) == layer, "one pass, layers in order"
        self.keys.append(key)
        self.values.append(value)
        parts = [torch.split(tensor, list(self.slots)) for tensor in (query, key, value)]
        return torch.cat([self._one(*part) for part in zip(*parts, strict=True)])

    @staticmethod
    def _one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


@dataclass
class Rows:
    """Name the rounds still drafting: `index` [R'] into all rounds, ascending, and how many each sequence has."""

    index: Tensor
    counts: list[int]

    @classmethod
    def all_of(cls, batch: PackedBatch) -> Rows:
        """Start with every round."""
        return cls(torch.arange(len(batch.start), device=batch.start.device), list(batch.rounds))

    def keep(self, mask: Tensor, batch: PackedBatch) -> Rows:
        """Keep the rounds where mask [R'] is true."""
        owner = torch.repeat_interleave(torch.arange(len(batch.rounds)), torch.tensor(batch.rounds)).to(mask.device)
        index = self.index[mask]
        return Rows(index, torch.bincount(owner[index], minlength=len(batch.rounds)).tolist())


@dataclass
class RoundAttention:
    """Attend from rounds to the true slots before their start and to their own earlier depths."""

    batch: PackedBatch
    slots: SlotAttention
    rows: Rows
    own_keys: list[list[Tensor]] = field(default_factory=list)  # [depth][layer]: [R', G, K]
    own_values: list[list[Tensor]] = field(default_factory=list)

    def next_depth(self, kept: Tensor, rows: Rows) -> None:
        """Keep only the rounds in `kept` (mask [R'] of the last depth) and open a new depth."""
        self.rows = rows
        self.own_keys = [[layer[kept] for layer in depth] for depth in self.own_keys] + [[]]
        self.own_values = [[layer[kept] for layer in depth] for depth in self.own_values] + [[]]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from query [R', H, K]; key and value [R', G, K] are this depth's own."""
        self.own_keys[-1].append(key)
        self.own_values[-1].append(value)
        own_key = torch.stack([depth[layer] for depth in self.own_keys], dim=1)  # [R', s, G, K]
        own_value = torch.stack([depth[layer] for depth in self.own_values], dim=1)
        counts, slots = self.rows.counts, list(self.batch.slots)
        parts = zip(
            torch.split(query, counts),
            torch.split(own_key, counts),
            torch.split(own_value, counts),
            torch.split(self.slots.keys[layer], slots),
            torch.split(self.slots.values[layer], slots),
            torch.split(self.batch.start[self.rows.index], counts),
            torch.tensor([0, *slots]).cumsum(0).tolist()[:-1],
            strict=True,
        )
        return torch.cat([attend_round(q, k, v, ks, vs, start - first) for q, k, v, ks, vs, start, first in parts])


def attend_round(
    query: Tensor, own_key: Tensor, own_value: Tensor, key: Tensor, value: Tensor, last: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Attend from query [L, H, K] to slots 0 … last [L] of key and value [n, G, K] and to own keys [L, s, G, K].

    `seen` [L, s] says which own keys a query sees, None for all of them.
    """
    (rounds, heads, size), (slots, groups, _) = query.shape, key.shape
    query = query.view(rounds, groups, heads // groups, size) * size**-0.5  # [L, G, Q, K]
    flat = query.transpose(0, 1).reshape(groups, rounds * heads // groups, size)  # [G, L*Q, K]
    scores = torch.bmm(flat, key.permute(1, 2, 0)).view(groups, rounds, heads // groups, slots)  # [G, L, Q, n]
    hidden = torch.arange(slots, device=last.device) > last[:, None]  # [L, n]
    scores = scores.masked_fill(hidden[None, :, None], -torch.inf)
    own = torch.einsum("lgqk,lsgk->glqs", query, own_key)
    if seen is not None:
        own = own.masked_fill(~seen[None, :, None], -torch.inf)
    weights = torch.cat((scores, own), dim=-1).softmax(-1)  # [G, L, Q, n+s]
    true, mine = torch.split(weights, [slots, own.shape[-1]], dim=-1)
    out = torch.bmm(true.reshape(groups, rounds * heads // groups, slots), value.transpose(0, 1))  # [G, L*Q, K]
    out = out.view(groups, rounds, heads // groups, size).transpose(0, 1)  # [L, G, Q, K]
    return (out + torch.einsum("glqs,lsgk->lgqk", mine, own_value)).reshape(rounds, heads, size)

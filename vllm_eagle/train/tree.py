"""Expected accepted length of a dynamic tree, from the head alone: every round of an answer grows its tree.

    level 0     the newest true token; the head's output there proposes `width` children
    level d     the `width` nodes of greatest path value propose `width` children each
    at the end  the `nodes` best of all proposals by path value stay (EAGLE-2, section 4); a child never outvalues its
                parent, so what stays is a tree

Shapes: `R` rounds of one sequence, `W` width, `C` candidates of one level (W, then W·W), `D` hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_eagle.heads import Head
from vllm_eagle.train.batches import PackedBatch, pack
from vllm_eagle.train.features import Example
from vllm_eagle.train.unroll import SlotAttention, attend_round
from vllm_eagle.train.words import Words


@dataclass(frozen=True)
class TreeShape:
    """Name a dynamic tree: drafted nodes kept (the root not counted), children and expansions a level, levels."""

    nodes: int = 25
    width: int = 10
    levels: int = 6


@dataclass
class _Level:
    """Hold the expanded nodes of a level and what they came from."""

    tokens: Tensor  # [R, W]
    values: Tensor  # [R, W] log of the path value
    true: Tensor  # [R, W] bool: the path up to here is what the target wrote
    out: Tensor  # [R, W, D] output of the parent


@dataclass
class _Lineage:
    """Attend from nodes to the true slots and to their ancestors; keys follow the nodes as they are chosen."""

    batch: PackedBatch
    slots: SlotAttention
    width: int
    keys: list[list[Tensor]] = field(default_factory=list)  # [level][layer]: [R*W, G, K]
    values: list[list[Tensor]] = field(default_factory=list)

    def descend(self, parents: Tensor | None) -> None:
        """Open a level whose nodes descend from nodes `parents` [R*W] of the last one."""
        if parents is not None:
            self.keys = [[layer[parents] for layer in level] for level in self.keys]
            self.values = [[layer[parents] for layer in level] for level in self.values]
        self.keys.append([])
        self.values.append([])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[-1].append(key)
        self.values[-1].append(value)
        own_key = torch.stack([level[layer] for level in self.keys], dim=1)
        own_value = torch.stack([level[layer] for level in self.values], dim=1)
        last = self.batch.start.repeat_interleave(self.width)
        return attend_round(query, own_key, own_value, self.slots.keys[layer], self.slots.values[layer], last)


@dataclass
class _Grower:
    """Hold what the trees of all rounds of one sequence share, and every proposal made for them."""

    head: Head
    batch: PackedBatch
    words: Words
    vocabulary: Tensor
    shape: TreeShape
    values: list[Tensor] = field(default_factory=list)  # by level: [R, C]
    true: list[Tensor] = field(default_factory=list)

    def propose(self, out: Tensor, values: Tensor, true: Tensor) -> tuple[_Level, Tensor]:
        """Let nodes with outputs [R, W, D], values and truth [R, W] propose children; return the best for expansion.

        Their parents' rows [R*W] among the nodes come along.
        """
        hidden, lm_head = self.head.readout(out, self.words.lm_head)
        best = (hidden @ lm_head.T).log_softmax(-1).topk(self.shape.width, dim=-1)  # [R, W, width]
        tokens = self.vocabulary[best.indices]
        told = torch.full((len(out),), -1)  # [R] what the target took at this level; -1 after the answer's end
        depth = len(self.values)
        told[: len(out) - depth] = self.batch.chosen[depth:]
        self.values.append((values.unsqueeze(-1) + best.values).flatten(1))
        self.true.append((true.unsqueeze(-1) & (tokens == told[:, None, None])).flatten(1))
        return self._choose(out, tokens.flatten(1))

    def _choose(self, out: Tensor, tokens: Tensor) -> tuple[_Level, Tensor]:
        best = self.values[-1].topk(self.shape.width, dim=1)
        parent = best.indices // self.shape.width  # [R, W] among the nodes that proposed
        rows = torch.arange(len(out)).unsqueeze(1)
        true = self.true[-1].gather(1, best.indices)
        level = _Level(tokens.gather(1, best.indices), best.values, true, out[rows, parent])
        return level, (rows * out.shape[1] + parent).flatten()

    def accepted(self) -> Tensor:
        """Return [R]: true nodes among the best of all proposals. They are one path from the root."""
        kept = torch.cat(self.values, 1).topk(self.shape.nodes, dim=1).indices
        return torch.cat(self.true, 1).gather(1, kept).sum(1)


@torch.inference_mode()
def accepted_lengths(head: Head, example: Example, words: Words, vocabulary: Tensor, shape: TreeShape) -> Tensor:
    """Return [R]: how many drafted tokens the target would accept in a round that starts at each answer position."""
    batch = pack([example])
    slots, grower = SlotAttention(batch.slots), _Grower(head, batch, words, vocabulary, shape)
    out = head(words.embedding[batch.tokens], head.fuse(batch.features), batch.positions, slots)[batch.start].unsqueeze(1)
    rounds = len(out)
    level, _ = grower.propose(out, torch.zeros(rounds, 1), torch.ones(rounds, 1, dtype=torch.bool))
    lineage, parents = _Lineage(batch, slots, shape.width), None
    for depth in range(1, shape.levels):
        lineage.descend(parents)
        place = (batch.positions[batch.start] + depth).repeat_interleave(shape.width)
        out = head(words.embedding[level.tokens.flatten()], level.out.flatten(0, 1), place, lineage)
        level, parents = grower.propose(out.view(rounds, shape.width, -1), level.values, level.true)
    return grower.accepted()


def walk(accepted: Tensor) -> tuple[int, int]:
    """Return rounds and tokens of serving an answer: each round emits what it accepts and one token of the target."""
    rounds = tokens = at = 0
    while at < len(accepted):
        gain = int(accepted[at]) + 1
        rounds, tokens, at = rounds + 1, tokens + gain, at + gain
    return rounds, tokens


def mean_accepted_length(head: Head, examples: Sequence[Example], words: Words, vocabulary: Tensor, shape: TreeShape) -> float:
    """Return the mean tokens a round emits over all answers."""
    walks = [walk(accepted_lengths(head, example, words, vocabulary, shape)) for example in examples]
    return sum(tokens for _, tokens in walks) / max(1, sum(rounds for rounds, _ in walks))

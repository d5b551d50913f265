"""What a head would get accepted when it is served, from captured answers alone.

The drafter, the growth policy, the draft vocabulary and the walk are those of serving; only the target is replaced by
what it wrote. Every position of an answer drafts as if serving had come to it:

    slot        0 … P-1    P     P+1   …       P prompt tokens
    request     0          1     2     …       its newly known positions: the prompt, then one token each
    root        xP         xP+1  xP+2  …       its tree hangs from the token ahead of its last known feature

`walk_answer` then visits the positions that serving lands on.
Shapes: `N` slots, `R` rounds (positions of an answer), `F` frontier nodes, `S` scratch rows, `H` heads, `G` K/V heads,
`K` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_eagle.drafting import DraftVocabulary, HeadDrafter, Known
from vllm_eagle.heads import AnyHead
from vllm_eagle.train.batches import PackedBatch, pack
from vllm_eagle.train.features import Example
from vllm_eagle.train.unroll import SlotAttention, attend_round
from vllm_eagle.train.words import Words
from vllm_eagle.tree import DraftTree, Growth, TreeRows
from vllm_eagle.verify import walk_greedy


class AnswerCache:
    """Keep the head's keys and values of one whole answer; a round sees those up to its start (see `HeadCache`)."""

    def __init__(self, batch: PackedBatch) -> None:
        self.slots, self.start = SlotAttention(batch.slots), batch.start

    def attend_known(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `HeadCache`: all slots are known at once, so one causal pass serves every round."""
        if len(query) == len(key):
            return self.slots(layer, query, key, value)
        everywhere = query.new_zeros(len(key), *query.shape[1:])
        everywhere[self.start] = query
        return self.slots(layer, everywhere, key, value)[self.start]

    def level_rows(self, drafting: Tensor, words: Tensor, key_stride: int) -> TreeRows:
        """See `HeadCache`; the context is not paged, so there is no block table."""
        context = (self.start[drafting] + 1).int()
        return TreeRows.of_level(words, key_stride, context, torch.empty(len(drafting), 0, dtype=torch.int32))

    def attend_level(self, layer: int, query: Tensor, tree_key: Tensor, tree_value: Tensor, rows: TreeRows) -> Tensor:
        """See `HeadCache`."""
        rounds, width = len(rows.num_rows), len(rows.words) // len(rows.num_rows)
        seen = (rows.words.unsqueeze(1) >> torch.arange(len(tree_key) // rounds)) & 1 == 1  # [R*F, S]
        used = int(seen.any(0).nonzero().max()) + 1  # a level's own rows come last; what lies behind was never written
        own_key, own_value = (
            x.view(rounds, -1, *x.shape[1:])[:, :used].repeat_interleave(width, 0) for x in (tree_key, tree_value)
        )
        last = (rows.context_len.long() - 1).repeat_interleave(width)
        keys, values = self.slots.keys[layer], self.slots.values[layer]
        return attend_round(query, own_key, own_value, keys, values, last, seen[:, :used])


def draft_everywhere(head: AnyHead, example: Example, words: Words, growth: Growth) -> list[DraftTree]:
    """Return the tree of every round [R] of an answer; `words` are cut to the draft vocabulary."""
    batch = pack([example])
    rounds, tokens = len(batch.start), example.tokens.numpy().astype(np.int32)
    known = Known(
        request_ids=[str(r) for r in range(rounds)],
        features=batch.features,
        next_tokens=batch.tokens,
        positions=batch.positions,
        lengths=torch.tensor([example.prompt_length] + [1] * (rounds - 1), dtype=torch.int32),
        rooms=[growth.size] * rounds,
        histories=[tokens[: example.prompt_length + 1 + r] for r in range(rounds)],
    )

    def logits(features: Tensor) -> Tensor:
        hidden, lm_head = head.readout(features, words.lm_head)
        return hidden @ lm_head.T

    embedding = head.embedding(words.embedding)
    drafter = HeadDrafter(head, lambda ids: embedding[ids], DraftVocabulary(logits, words.vocabulary), growth)
    return drafter.draft(known, AnswerCache(batch))


@torch.inference_mode()
def accepted_lengths(head: AnyHead, example: Example, words: Words, growth: Growth) -> Tensor:
    """Return [R]: how many drafted tokens the target accepts in a round that starts at each answer position.

    A path that reaches the answer's end counts up to there: what the target would have said next is not known.
    """
    trees = draft_everywhere(head, example, words, growth)
    written = example.tokens[example.prompt_length + 1 :].numpy()  # [R] what each round's root is followed by
    told = np.append(written, np.full(growth.depth + 1, -1))
    best = [told[r + tree.depths] for r, tree in enumerate(trees)]  # right on the true path; nowhere else is it asked for
    paths = walk_greedy(trees, [True] * len(trees), best).paths
    return torch.tensor([len(path) for path in paths])


@dataclass(frozen=True)
class Served:
    """Count what serving some answers takes: drafts (engine steps that verify a tree) and the tokens accepted from them."""

    drafts: int
    accepted: int

    @property
    def mean_length(self) -> float:
        """Return the mean accepted length as vLLM counts it: 1 + accepted tokens / drafts."""
        return 1 + self.accepted / max(1, self.drafts)


def walk_answer(accepted: Tensor) -> Served:
    """Serve an answer whose rounds accept [R] tokens.

    Serving starts at the first position, and jumps behind the accepted tokens and the one the target adds to them.
    """
    drafts = taken = at = 0
    while at < len(accepted):
        gain = int(accepted[at])
        drafts, taken, at = drafts + 1, taken + gain, at + gain + 1
    return Served(drafts, taken)


def serve(head: AnyHead, examples: Sequence[Example], words: Words, growth: Growth) -> Served:
    """Count drafts and accepted tokens of serving all these answers greedily.

    vLLM's counters agree but for an answer's last step: what is accepted behind the end counts there and not here.
    """
    walks = [walk_answer(accepted_lengths(head, example, words, growth)) for example in examples]
    return Served(sum(one.drafts for one in walks), sum(one.accepted for one in walks))

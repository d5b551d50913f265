"""The drafting loop as the paper defines it: no cache, the whole prefix each time. The specification of `HeadDrafter`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_eagle.heads import Head
from vllm_eagle.tree import DynamicGrowth

Path = tuple[int, ...]
"""Tokens from the root, which is left out, to a node."""


def next_feature(
    head: Head, embed: Callable[[Tensor], Tensor], features: Tensor, tokens: Tensor, path: list[int], own: Tensor
) -> Tensor:
    """Return the feature the head predicts at the end of a root-to-node path, [D].

    `features` [L, D] ([L, 3D] for EAGLE-3) are the target's of positions 0..L-1, `tokens` [L+1] the certain tokens, root last,
    `own` [len(path), D] what this function returned for the root and every node of the path but the last (EAGLE-1, figure 6):

        feature   f_0  f_1  ...  f_L-1 | f^_L     f^_L+1        the last ones are the head's own
        token     t_1  t_2  ...  t_L   | path[0]  path[1]       t_L is the root
        output                   f^_L  | f^_L+1   f^_L+2        the last one is returned
    """
    ahead = torch.cat((tokens[1:], torch.tensor(path, dtype=torch.long)))
    return head(embed(ahead), torch.cat((head.fuse(features), own)), torch.arange(len(ahead)), _causal)[-1]


def grow(
    growth: DynamicGrowth,
    head: Head,
    embed: Callable[[Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    features: Tensor,
    tokens: Tensor,
) -> dict[Path, float]:
    """Return every candidate's path and log path value (EAGLE-2, section 4), each node from the whole prefix."""
    found: dict[Path, float] = {}
    frontier: dict[Path, tuple[float, list[Tensor]]] = {(): (0.0, [])}
    for _ in range(growth.depth):
        level: dict[Path, tuple[float, list[Tensor]]] = {}
        for path, (value, own) in frontier.items():
            guessed = torch.stack(own) if own else head.fuse(features[:0])
            feature = next_feature(head, embed, features, tokens, list(path), guessed)
            logprobs = logits(feature[None])[0].float().log_softmax(0)
            for logprob, token in zip(*(x.tolist() for x in logprobs.topk(growth.top_k)), strict=True):
                level[(*path, token)] = value + logprob, [*own, feature]
        found |= {path: value for path, (value, _) in level.items()}
        best = sorted(level, key=lambda path: -level[path][0])[: growth.top_k]
        frontier = {path: level[path] for path in best}
    return found


def _causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally over the whole prefix: query [L, H, K], key and value [L, G, K]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

"""A draft written the slow, obvious way: every output comes from a fresh pass over the whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_eagle.heads import AnyHead, Eagle3Head, Head, HeadConfig, new_head
from vllm_eagle.train.features import Example
from vllm_eagle.train.words import Words


def random_head(config: HeadConfig, seed: int = 0, words: Words | None = None) -> AnyHead:
    """Return a head with weights large enough to have opinions; an EAGLE-3 head drafts from `words`."""
    torch.manual_seed(seed)
    head = new_head(config)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    if isinstance(head, Eagle3Head):
        assert words is not None
        head.set_vocabulary(words.vocabulary)
    return head.requires_grad_(False)


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally within one sequence [T, H, K]."""
    parts = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def draft(head: Head, example: Example, words: Words, start: int, path: list[int]) -> Tensor:
    """Return the feature [D] the head gives after true slots 0 … `start` and its own tokens `path`."""
    tokens, features = example.tokens[1 : start + 2].tolist(), list(head.fuse(example.features[: start + 1].float()))
    for token in [*path, None]:
        out = head(words.embedding[tokens], torch.stack(features), torch.arange(len(tokens)), causal)[-1]
        if token is not None:
            tokens.append(token)
            features.append(out)
    return out


def logits(head: Head, out: Tensor, words: Words) -> Tensor:
    """Return [S]: what the head thinks of each word after its output [D]."""
    hidden, lm_head = head.readout(out, words.lm_head)
    return lm_head @ hidden

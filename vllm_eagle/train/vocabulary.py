"""The draft vocabulary: the tokens the target really uses, most frequent first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from vllm_eagle.errors import EagleError
from vllm_eagle.train.features import Example


def frequent_tokens(examples: Iterable[Example], vocab_size: int, size: int) -> Tensor:
    """Return up to `size` token ids [S], most frequent in the answers first; ties go to the smaller id.

    A token counts once where it was written and with the target's probability wherever it was a candidate.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for example in examples:
        written = example.tokens[example.prompt_length :]
        counts.index_add_(0, written, torch.ones(len(written), dtype=torch.float64))
        counts.index_add_(0, example.top_ids.flatten(), example.top_probs.flatten().double())
    order = torch.argsort(counts, descending=True, stable=True)[:size]
    return order[counts[order] > 0]


def places(vocabulary: Tensor, vocab_size: int) -> Tensor:
    """Return [V]: each token's row in the vocabulary [S], or -1."""
    found = torch.full((vocab_size,), -1, dtype=torch.long, device=vocabulary.device)
    found[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return found


def write_vocabulary(path: Path, vocabulary: Tensor) -> None:
    """Write the ids as one JSON list, most frequent first."""
    path.write_text(json.dumps(vocabulary.tolist(), separators=(",", ":")) + "\n")


def read_vocabulary(path: Path, vocab_size: int) -> Tensor:
    """Read what `write_vocabulary` wrote; raises `EagleError` for ids outside the target's vocabulary."""
    try:
        ids = torch.tensor(json.loads(path.read_text()), dtype=torch.long)
    except (OSError, ValueError, TypeError) as bad:
        raise EagleError(f"{path}: not a list of token ids ({bad})") from None
    if ids.dim() != 1 or not len(ids) or int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise EagleError(f"{path}: ids must be a list within 0 … {vocab_size - 1}; it is for another target's vocabulary")
    return ids

"""From a predicted feature to the best next tokens, over the whole vocabulary or its frequent part.

The LM head is most of a drafting pass of a small model with a large vocabulary. Tokens the target rarely writes are
rarely worth drafting: a list of the frequent ones makes the pass cheaper and cannot change any output.
Shapes: `n` features, `D` hidden, `V` draft vocabulary, `k` candidates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vllm_eagle.drafting.noise import Draws
from vllm_eagle.errors import EagleError


class DraftVocabulary:
    """Rank tokens by the draft LM head."""

    def __init__(self, logits: Callable[[Tensor], Tensor], tokens: Tensor | None = None) -> None:
        """`logits` maps features [n, D] to [n, V]; `tokens` [V] are their ids, None when they are 0..V-1."""
        self.logits, self.tokens = logits, tokens

    def __call__(self, features: Tensor, k: int, draws: Draws | None = None, level: int = 0) -> tuple[Tensor, Tensor]:
        """Return the k best tokens [n, k] (int64, best first) and their log-probabilities [n, k] (float32).

        With `draws` of R requests, n/R features of each in order, "best" is what the target is likely to draw at `level`.
        """
        logits = self.logits(features).float()
        if draws is not None:
            tokens = torch.arange(logits.shape[1]) if self.tokens is None else self.tokens
            logits = draws.scores(logits.view(len(draws.temperatures), -1, logits.shape[1]), tokens, level).flatten(0, 1)
        best, index = logits.topk(k, dim=-1)
        logprobs = best - logits.logsumexp(-1, keepdim=True)
        return (index if self.tokens is None else self.tokens[index]), logprobs


def read_vocabulary(path: Path, vocab_size: int) -> Tensor:
    """Read a JSON list of token ids [V] (int64, sorted, distinct); raises `EagleError` naming the file."""
    try:
        ids = json.loads(path.read_text())
    except OSError as bad:
        raise EagleError(f"draft vocabulary {path} cannot be read ({bad.strerror})") from None
    except json.JSONDecodeError as bad:
        raise EagleError(f"draft vocabulary {path} is not valid JSON ({bad})") from None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise EagleError(f"draft vocabulary {path}: want a list of token ids")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise EagleError(f"draft vocabulary {path}: token {outside[0]} is outside the target's vocabulary of {vocab_size}")
    return torch.tensor(sorted(set(ids)))

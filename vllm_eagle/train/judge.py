"""Judge an exported head on captured answers: chain and tree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_eagle.heads import AnyHead, Eagle3Head, load_head
from vllm_eagle.train.card import Judgement
from vllm_eagle.train.evaluate import chain_acceptance
from vllm_eagle.train.features import Example, read_examples
from vllm_eagle.train.served import serve
from vllm_eagle.train.target import count_layers
from vllm_eagle.train.vocabulary import read_vocabulary
from vllm_eagle.train.words import Ends
from vllm_eagle.tree import Growth


def judge(
    model: Path, head_folder: Path, features: Path, growth: Growth, limit: int | None, aux_layers: Sequence[int] | None = None
) -> Judgement:
    """Score the head in `head_folder` on up to `limit` answers of `features`.

    The chain is drafted from every position of the answers, trees of `growth` from those positions that serving lands on.
    `aux_layers` of the target are read in place of those the head names.
    """
    head, ends = load_head(head_folder), Ends.load(model)
    layers = head.config.reading(aux_layers).states_read(count_layers(model))
    examples: Sequence[Example] = read_examples(features, layers)[:limit]
    ends.check(examples, layers)
    words = ends.words(_vocabulary(head, head_folder))
    return Judgement(
        features.name,
        len(examples),
        chain_acceptance(head, examples, words),
        growth,
        serve(head, examples, words, growth),
    )


def _vocabulary(head: AnyHead, folder: Path) -> Tensor:
    """Return the tokens drafted from [S]: an EAGLE-3 head's own, else `draft_vocab.json` beside the head, else all."""
    if isinstance(head, Eagle3Head):
        return head.vocabulary
    listed, size = folder / "draft_vocab.json", head.config.vocab_size
    return read_vocabulary(listed, size) if listed.is_file() else torch.arange(size)


def as_json(judged: Judgement, head_folder: Path) -> str:
    """Return the figures as one line of JSON."""
    return json.dumps(
        {
            "head": str(head_folder),
            "answers": judged.answers,
            "alpha": [round(rate, 4) for rate in judged.chain.rates],
            "chain_length": round(judged.chain.mean_length, 3),
            "tree_length": round(judged.served.mean_length, 3),
            "drafts": judged.served.drafts,
        }
    )

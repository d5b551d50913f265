"""Judge an exported head on captured answers: chain and tree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_eagle.heads import load_head
from vllm_eagle.train.card import Judgement
from vllm_eagle.train.evaluate import chain_acceptance
from vllm_eagle.train.features import Example, read_examples
from vllm_eagle.train.served import serve
from vllm_eagle.train.vocabulary import read_vocabulary
from vllm_eagle.train.words import Ends
from vllm_eagle.tree import Growth


def judge(model: Path, head_folder: Path, features: Path, growth: Growth, limit: int | None) -> Judgement:
    """Score the head in `head_folder` on up to `limit` answers of `features`.

    Drafts come from `draft_vocab.json` beside the head when it is there, from the whole vocabulary otherwise. The chain is
    drafted from every position of the answers; trees of `growth` from those positions that serving lands on.
    """
    head = load_head(head_folder)
    listed = head_folder / "draft_vocab.json"
    size = head.config.vocab_size
    vocabulary = read_vocabulary(listed, size) if listed.is_file() else torch.arange(size)
    ends = Ends.load(model)
    examples: Sequence[Example] = read_examples(features)[:limit]
    ends.check(examples)
    words = ends.words(vocabulary)
    return Judgement(
        features.name,
        len(examples),
        chain_acceptance(head, examples, words),
        growth,
        serve(head, examples, words, vocabulary, growth),
    )


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

"""Captured features on disk: one safetensors file per group of answers, complete or absent.

    token     x0 x1 … x(P-1) | xP … x(T-1)        P prompt tokens, then the answer
    feature   f0 f1 … f(P-1) | fP … f(T-2)        f(T-1) guides no token of the answer and is not kept
    aux       a0 a1 … a(P-1) | aP … a(T-2)        only for heads that read them: inputs of some layers, side by side
    top       ·  ·  … r0     | r1 … r(A-1)        row r = the target's best tokens after f(P-1+r); A = T-P

Shapes: `S` sequences of a shard, `N` their features in one row, `M` their answer tokens, `K` kept candidates, `D` hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_eagle.errors import EagleError
from vllm_eagle.train.answers import Answer


@dataclass(frozen=True)
class Example:
    """Hold one captured sequence of T tokens with A answer tokens."""

    tokens: Tensor  # [T] int64
    features: Tensor  # [T-1, D] float16; for a head that reads auxiliary states these, [T-1, 3D]
    top_ids: Tensor  # [A, K] int64, best first
    top_probs: Tensor  # [A, K] float16, at temperature 1, not renormalised

    @property
    def prompt_length(self) -> int:
        return self.tokens.shape[0] - self.top_ids.shape[0]

    @property
    def answer_length(self) -> int:
        return self.top_ids.shape[0]


def best_tokens(logits: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Return the best tokens [N, K] of logits [N, V], best first, and their probabilities [N, K] at temperature 1."""
    best = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
    return best.indices, (best.values - logits.logsumexp(-1, keepdim=True)).exp()


def write_shard(
    path: Path, answers: Sequence[Answer], examples: Sequence[Example], aux: Sequence[Tensor], aux_layers: Sequence[int]
) -> None:
    """Write a shard under a temporary name and rename it, so that it is complete or absent.

    `aux` are the examples' auxiliary states [T-1, A*D], not kept where `aux_layers` is empty.
    """
    tensors = {
        "tokens": torch.cat([example.tokens for example in examples]).to(torch.int32),
        "features": torch.cat([example.features for example in examples]).to(torch.float16),
        "top_ids": torch.cat([example.top_ids for example in examples]).to(torch.int32),
        "top_probs": torch.cat([example.top_probs for example in examples]).to(torch.float16),
        "lengths": torch.tensor([[len(e.tokens), e.answer_length] for e in examples], dtype=torch.int32),
    }
    if aux_layers:
        tensors["aux"] = torch.cat(list(aux)).to(torch.float16)
    keys = " ".join(answer.fingerprint() for answer in answers)
    half = path.with_suffix(".tmp")
    try:
        save_file(tensors, half, metadata={"keys": keys, "aux_layers": ",".join(map(str, aux_layers))})
        os.replace(half, path)
    except (OSError, SafetensorError) as bad:
        half.unlink(missing_ok=True)
        raise EagleError(f"{path}: cannot write ({bad}); free some space and run again, it resumes") from None


def shard_paths(folder: Path) -> list[Path]:
    """Return the shards of `folder` in order; empty when there is no such folder."""
    return sorted(folder.glob("features-*.safetensors"))


def captured_keys(folder: Path) -> set[str]:
    """Return the fingerprints of all sequences in `folder`; an unreadable shard is renamed `.bad` and does not count."""
    keys: set[str] = set()
    for path in shard_paths(folder):
        try:
            with safe_open(path, "pt") as shard:
                keys.update(shard.metadata()["keys"].split())
        except (SafetensorError, OSError):
            path.rename(path.with_suffix(".bad"))
    return keys


def captured_layers(folder: Path) -> tuple[int, ...] | None:
    """Return the layers whose auxiliary states `folder` holds, () for features alone, None where nothing is captured."""
    for path in shard_paths(folder):
        with _readable(path), safe_open(path, "pt") as shard:
            return _layers(shard)
    return None


def read_examples(folder: Path, aux_layers: tuple[int, ...] = ()) -> list[Example]:
    """Read all examples of `folder`; raises `EagleError` when there are none.

    With `aux_layers` the states of these layers take the place of the features; raises `EagleError` when others, or
    none, were captured.
    """
    examples = [example for path in shard_paths(folder) for example in _read_shard(path, aux_layers)]
    if not examples:
        raise EagleError(f"no features in {folder}; run the capture step first")
    return examples


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as bad:
        raise EagleError(f"{path} cannot be read ({bad}); run the capture step again, it replaces the shard") from None


def _layers(shard: Any) -> tuple[int, ...]:
    return tuple(map(int, filter(None, shard.metadata().get("aux_layers", "").split(","))))


def _read_shard(path: Path, aux_layers: tuple[int, ...]) -> Iterator[Example]:
    states = "aux" if aux_layers else "features"
    with _readable(path), safe_open(path, "pt") as file:
        if aux_layers and (found := _layers(file)) != aux_layers:
            wanted = ",".join(map(str, aux_layers))
            raise EagleError(
                f"{path} holds states of layers {','.join(map(str, found)) or '(none)'}, the head reads {wanted}; "
                f"capture into another folder with --aux-layers {wanted}"
            )
        shard = {name: file.get_tensor(name) for name in ("tokens", states, "top_ids", "top_probs", "lengths")}
    begin = answer_begin = 0
    for number, (length, answer) in enumerate(shard["lengths"].tolist()):
        first = begin - number  # every sequence before this one has one feature fewer than tokens
        yield Example(
            tokens=shard["tokens"][begin : begin + length].long(),
            features=shard[states][first : first + length - 1],
            top_ids=shard["top_ids"][answer_begin : answer_begin + answer].long(),
            top_probs=shard["top_probs"][answer_begin : answer_begin + answer],
        )
        begin, answer_begin = begin + length, answer_begin + answer

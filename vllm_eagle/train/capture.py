"""Capture the target's features for its own answers, once, to disk in float16.

Kept on disk rather than recomputed: 2 D bytes a token (1.2 KB at hidden size 576) against a whole forward pass of the
target in every epoch. The auxiliary states an EAGLE-3 head reads cost three times as much, and are kept only when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_eagle.errors import EagleError
from vllm_eagle.heads import AUX_STATES, default_aux_layers
from vllm_eagle.train.answers import Answer, read_all
from vllm_eagle.train.features import Example, best_tokens
from vllm_eagle.train.progress import Progress
from vllm_eagle.train.shards import CANDIDATES, CHECK_EVERY, Captured, CaptureReport, ShardWriter
from vllm_eagle.train.target import Target


@dataclass(frozen=True)
class CaptureConfig:
    """Say which answers to capture, where to, and how much at once."""

    answers: tuple[Path, ...]
    out: Path
    rows_per_shard: int = 64
    batch_tokens: int = 4096
    max_length: int = 1024
    candidates: int = CANDIDATES
    aux_layers: tuple[int, ...] = ()


def capture(config: CaptureConfig, target: Target) -> CaptureReport:
    """Capture every answer not captured yet; raises `EagleError` where stored features fail the argmax check."""
    answers, skipped = read_all(config.answers)
    writer = ShardWriter(config.out, config.aux_layers, config.rows_per_shard)
    usable = [answer for answer in answers if _fits(answer, config, target, writer.report)]
    todo = [answer for answer in usable if answer not in writer]
    if not usable:
        raise EagleError(f"no usable answer in {', '.join(map(str, config.answers))} ({skipped}; {writer.report})")
    progress = Progress("features", len(usable), len(usable) - len(todo))
    for begin in range(0, len(todo), config.rows_per_shard):
        group = todo[begin : begin + config.rows_per_shard]
        captured = _captured(group, config, target, progress)
        for answer in group:
            writer.add(answer, captured[answer.fingerprint()])
    writer.close()
    return writer.report


def _fits(answer: Answer, config: CaptureConfig, target: Target, report: CaptureReport) -> bool:
    long = len(answer.token_ids) > config.max_length
    foreign = max(answer.token_ids) >= target.lm_head.shape[0]
    report.too_long += long
    report.foreign += foreign and not long
    return not long and not foreign


def _captured(answers: Sequence[Answer], config: CaptureConfig, target: Target, progress: Progress) -> dict[str, Captured]:
    """Run the target over a group of answers; the result is keyed by their fingerprints."""
    found: dict[str, Captured] = {}
    for bucket in buckets(answers, config.batch_tokens):
        states = target.states([answer.token_ids for answer in bucket], config.aux_layers)
        for answer, (feature, aux) in zip(bucket, states, strict=True):
            kept = _kept(aux, config.aux_layers)
            found[answer.fingerprint()] = _one(answer, feature, kept, config.candidates, target, len(found) % CHECK_EVERY == 0)
            progress.add(len(answer.out_ids))
    return found


def buckets(answers: Sequence[Answer], batch_tokens: int) -> Iterator[list[Answer]]:
    """Yield groups of like length, each at most `batch_tokens` when padded to its longest."""
    group: list[Answer] = []
    for answer in sorted(answers, key=lambda one: len(one.token_ids)):
        if group and (len(group) + 1) * len(answer.token_ids) > batch_tokens:
            yield group
            group = []
        group.append(answer)
    if group:
        yield group


def read_aux_layers(word: str, target_layers: int) -> tuple[int, ...]:
    """Read `auto`, `off` or three layer numbers; raises `EagleError` for a number that is no layer of the target."""
    if word in ("auto", "off"):
        return default_aux_layers(target_layers) if word == "auto" else ()
    try:
        layers = tuple(map(int, word.split(",")))
    except ValueError:
        layers = ()
    if len(layers) != AUX_STATES or min(layers) < 0 or max(layers) >= target_layers:
        raise EagleError(f"--aux-layers {word}: give auto, off, or {AUX_STATES} numbers within 0 … {target_layers - 1}")
    return layers


def _kept(aux: Tensor, layers: Sequence[int]) -> Tensor:
    """Keep auxiliary states [T-1, A*D] in float16, which the inputs of some models' layers do not fit."""
    kept = aux[:-1].half().cpu()
    if not kept.isfinite().all():
        raise EagleError(f"a state of layers {','.join(map(str, layers))} exceeds float16; name others with --aux-layers")
    return kept


def _one(answer: Answer, feature: Tensor, aux: Tensor, candidates: int, target: Target, check: bool) -> Captured:
    """Keep features [T-1, D] and the best candidates after each of the A features that guide the answer."""
    kept = feature[:-1].half().cpu()
    guides = feature[len(answer.prompt_ids) - 1 : -1]  # [A, D]
    ids, probs = best_tokens(target.logits(guides), candidates)  # [A, K]
    example = Example(torch.tensor(answer.token_ids), kept, ids.cpu(), probs.half().cpu())
    if not check:
        return Captured(example, aux)
    again = target.logits(kept[len(answer.prompt_ids) - 1 :].to(guides.device)).argmax(-1)
    return Captured(example, aux, len(again), int((again == ids[:, 0]).sum()))

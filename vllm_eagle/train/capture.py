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
from vllm_eagle.train.features import Example, captured_keys, captured_layers, shard_paths, write_shard
from vllm_eagle.train.progress import Progress
from vllm_eagle.train.target import Target


@dataclass(frozen=True)
class CaptureConfig:
    """Say which answers to capture, where to, and how much at once."""

    answers: tuple[Path, ...]
    out: Path
    rows_per_shard: int = 64
    batch_tokens: int = 4096
    max_length: int = 1024
    candidates: int = 16
    aux_layers: tuple[int, ...] = ()


@dataclass
class CaptureReport:
    """Count what was captured and how often the stored features give the target's own best token."""

    tokens: int = 0
    too_long: int = 0
    foreign: int = 0
    checked: int = 0
    reproduced: int = 0

    def __str__(self) -> str:
        share = 100 * self.reproduced / max(1, self.checked)
        return (
            f"{self.tokens} answer tokens captured; stored features give the target's argmax on {share:.2f} % of "
            f"{self.checked}; skipped: {self.too_long} too long, {self.foreign} with tokens outside the vocabulary"
        )


def capture(config: CaptureConfig, target: Target) -> CaptureReport:
    """Capture every answer not captured yet; raises `EagleError` when fewer than 99.9 % of the argmaxes are reproduced."""
    answers, skipped = read_all(config.answers)
    report = CaptureReport()
    usable = [answer for answer in answers if _fits(answer, config, target, report)]
    done = captured_keys(config.out)
    todo = [answer for answer in usable if answer.fingerprint() not in done]
    if not usable:
        raise EagleError(f"no usable answer in {', '.join(map(str, config.answers))} ({skipped}; {report})")
    if (held := captured_layers(config.out)) not in (None, config.aux_layers):
        raise EagleError(
            f"{config.out} holds states of layers {held or '(none)'}, this capture adds {config.aux_layers or '(none)'}; "
            f"use the same --aux-layers or another --out"
        )
    config.out.mkdir(parents=True, exist_ok=True)
    progress = Progress("features", len(usable), len(usable) - len(todo))
    for begin in range(0, len(todo), config.rows_per_shard):
        _capture_shard(todo[begin : begin + config.rows_per_shard], config, target, report, progress)
    return report


def _fits(answer: Answer, config: CaptureConfig, target: Target, report: CaptureReport) -> bool:
    long = len(answer.token_ids) > config.max_length
    foreign = max(answer.token_ids) >= target.lm_head.shape[0]
    report.too_long += long
    report.foreign += foreign and not long
    return not long and not foreign


def _capture_shard(
    answers: Sequence[Answer], config: CaptureConfig, target: Target, report: CaptureReport, progress: Progress
) -> None:
    examples: dict[str, tuple[Example, Tensor]] = {}
    for bucket in buckets(answers, config.batch_tokens):
        states = target.states([answer.token_ids for answer in bucket], config.aux_layers)
        for answer, (feature, aux) in zip(bucket, states, strict=True):
            example = _example(answer, feature, config.candidates, target, report)
            examples[answer.fingerprint()] = example, _kept(aux, config.aux_layers)
            progress.add(len(answer.out_ids))
    number = max((int(path.stem.split("-")[1]) for path in shard_paths(config.out)), default=-1) + 1
    path = config.out / f"features-{number:05d}.safetensors"
    if report.reproduced < 0.999 * report.checked:
        raise EagleError(f"{path} not written: {report}; the features are not what the LM head reads")
    ordered = [examples[answer.fingerprint()] for answer in answers]
    write_shard(path, answers, [example for example, _ in ordered], [aux for _, aux in ordered], config.aux_layers)


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


def _example(answer: Answer, feature: Tensor, candidates: int, target: Target, report: CaptureReport) -> Example:
    """Keep features [T-1, D] and the best candidates after each of the A features that guide the answer."""
    tokens = torch.tensor(answer.token_ids)
    kept = feature[:-1].half().cpu()
    guides = feature[len(answer.prompt_ids) - 1 : -1]  # [A, D]
    logits = target.logits(guides)  # [A, V]
    best = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
    probs = (best.values - logits.logsumexp(-1, keepdim=True)).exp()  # [A, K]
    report.tokens += len(answer.out_ids)
    if report.checked < 0.1 * report.tokens:  # a tenth of all tokens is evidence enough
        again = target.logits(kept[len(answer.prompt_ids) - 1 :].to(guides.device)).argmax(-1)
        report.checked += len(again)
        report.reproduced += int((again == best.indices[:, 0]).sum())
    return Example(tokens, kept, best.indices.cpu(), probs.half().cpu())

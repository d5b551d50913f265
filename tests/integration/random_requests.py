"""Requests with parameters drawn at random, run in random company, and a comparison of everything a user sees.

`logprob_token_ids` is not drawn: in vLLM 0.32 one such request takes the logprobs of all others in its batch away, without
speculation too. `test_logprobs.py` compares it among its like.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, MoveDirectionality

STRUCTURES: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}},
    {"json_object": True},
    {"regex": r"[ab]{3,9}[0-9]{2}(x|yz)*"},
    {"choice": ["abba", "abab", "yes", "no", "12"]},
    {"grammar": 'root ::= item ("," item)*\nitem ::= "a" | "b" | "(" root ")"'},
]


class Shift(LogitsProcessor):
    """Move every logit by one place for requests that ask for it, once their output has an even length."""

    def __init__(self, config: Any, device: torch.device, pinned: bool) -> None:
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.outputs.pop(index, None)
        for index, params, _, output in batch_update.added:
            self.outputs.pop(index, None)
            if (params.extra_args or {}).get("shift"):
                self.outputs[index] = output
        for one, two, direction in batch_update.moved:
            first, second = self.outputs.pop(one, None), self.outputs.pop(two, None)
            if first is not None:
                self.outputs[two] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self.outputs[one] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, output in self.outputs.items():
            if len(output) % 2 == 0:
                logits[index] = logits[index].roll(1)
        return logits


class Damp(AdapterLogitsProcessor):
    """Make what a request has just written less likely, by a function of its own."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("damp"):
            return None

        def damp(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            for token in output[-9:]:
                logits[token] -= 2.0
            return logits

        return damp


@dataclass(frozen=True)
class Request:
    """A prompt, its parameters and the step at which it arrives."""

    prompt: list[int]
    params: dict[str, Any]
    structure: dict[str, Any] | None
    arrival: int

    def sampling(self) -> SamplingParams:
        extra: dict[str, Any] = (
            {} if self.structure is None else {"structured_outputs": StructuredOutputsParams(**self.structure)}
        )
        if (pattern := self.params.get("repetition_detection")) is not None:
            extra["repetition_detection"] = RepetitionDetectionParams(**pattern)
        return SamplingParams(**{**self.params, **extra}, output_kind=RequestOutputKind.FINAL_ONLY)


class RequestMaker:
    """Draw requests over some tokens and words of a target.

    `think` starts a reasoning section, if the target has them; prompts are random tokens or, if given, some of `texts`.
    """

    def __init__(
        self, seed: int, tokens: list[int], words: list[str], think: int | None, texts: Sequence[list[int]] = ()
    ) -> None:
        self.random = random.Random(seed)
        self.tokens, self.words, self.think, self.texts = tokens, words, think, texts

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def some(self, most: int) -> list[int]:
        return self.random.sample(self.tokens, self.random.randint(1, most))

    def __call__(self) -> Request:
        draw, structure = self.random, None
        prompt = list(draw.choice(self.texts)) if self.texts else draw.choices(self.tokens, k=draw.randint(1, 90))
        params: dict[str, Any] = {
            "temperature": draw.choice([0, 0, 0.7, 1.3]),
            "seed": draw.randrange(2**31),
            "max_tokens": draw.choice([1, 2, 7, 20, 33, 40]),
            "ignore_eos": self.chance(0.5),
            "n": draw.choice([1, 1, 1, 3]),
            "include_stop_str_in_output": self.chance(0.5),
        }
        options: list[tuple[float, str, Any]] = [
            (0.2, "top_p", lambda: draw.choice([0.5, 0.9])),
            (0.2, "top_k", lambda: draw.choice([1, 5, 40])),
            (0.2, "min_p", lambda: draw.choice([0.05, 0.3])),
            (0.2, "presence_penalty", lambda: draw.choice([-1.5, 1.5])),
            (0.2, "frequency_penalty", lambda: draw.choice([-1.2, 1.2])),
            (0.2, "repetition_penalty", lambda: draw.choice([0.8, 1.3])),
            (0.2, "bad_words", lambda: draw.sample(self.words, 8)),
            (0.2, "logit_bias", lambda: {token: draw.choice([-100.0, -2.0, 2.0, 5.0]) for token in self.some(20)}),
            (0.15, "allowed_token_ids", lambda: sorted(draw.sample(self.tokens, len(self.tokens) // 2))),
            (0.2, "stop_token_ids", lambda: self.some(20)),
            (0.2, "stop", lambda: draw.sample(self.words, 3)),
            (0.3, "logprobs", lambda: draw.choice([0, 1, 4])),
            (0.2, "prompt_logprobs", lambda: draw.choice([0, 2])),
            (0.3, "extra_args", lambda: {name: True for name in self.random.sample(["shift", "damp"], draw.choice([1, 2]))}),
            (0.2, "flat_logprobs", lambda: True),
            (0.2, "skip_special_tokens", lambda: False),
            (0.2, "repetition_detection", lambda: {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}),
        ]
        for share, name, value in options:
            if self.chance(share):
                params[name] = value()
        if "stop" not in params and self.chance(0.1):
            params["detokenize"] = False
        if params["temperature"] == 0:
            params["n"] = 1  # vLLM refuses more
        if "stop_token_ids" in params and self.chance(0.5):
            params["min_tokens"] = draw.randint(1, params["max_tokens"])
        if self.chance(0.25):
            structure = draw.choice(STRUCTURES)
            for unfit in ("allowed_token_ids", "bad_words", "logit_bias", "extra_args"):  # may leave no token at all
                params.pop(unfit, None)
        if self.think is not None and self.chance(0.3):
            prompt.append(self.think)
            params["thinking_token_budget"] = draw.randint(0, 12)
        return Request(prompt, params, structure, arrival=draw.choice([0, 0, 0, draw.randint(1, 25)]))


def run(llm: LLM, requests: list[Request]) -> list[Any]:
    """Serve requests as they arrive and return their final outputs in order."""
    core, finished, step = llm.llm_engine, {}, 0
    waiting = dict(enumerate(requests))
    while waiting or core.has_unfinished_requests():
        idle = not core.has_unfinished_requests()
        for name in [name for name, request in waiting.items() if idle or request.arrival <= step]:
            request = waiting.pop(name)
            core.add_request(str(name), {"prompt_token_ids": request.prompt}, request.sampling())
        finished.update({int(out.request_id): out for out in core.step() if out.finished})
        step += 1
    return [finished[name] for name in range(len(requests))]


def differences(want: Any, got: Any, trades: int = 0) -> list[str]:
    """Name what differs between two outputs of one request; `trades` ranks of an output may be one off, by rounding."""
    found = [] if _logprobs_equal(want.prompt_logprobs, got.prompt_logprobs, trades) else ["prompt_logprobs"]
    if len(want.outputs) != len(got.outputs):
        return ["n"]
    for a, b in zip(want.outputs, got.outputs, strict=True):
        found += [
            f"{name} of output {a.index}: {getattr(a, name)!r} became {getattr(b, name)!r}"
            for name in ("token_ids", "text", "finish_reason", "stop_reason")
            if getattr(a, name) != getattr(b, name)
        ]
        if not _logprobs_equal(a.logprobs, b.logprobs, trades):
            found.append(f"logprobs of output {a.index}")
    return found


def _logprobs_equal(want: Any, got: Any, trades: int) -> bool:
    if want is None or got is None:
        return want is got
    if len(want) != len(got):
        return False
    for one, two in zip(want, got, strict=True):
        if one is None or two is None:
            if one is not two:
                return False
            continue
        if one.keys() != two.keys():
            return False
        if not all(_close(one[token], two[token]) for token in one):
            return False
        away = [(one[token].rank, two[token].rank) for token in one if not _ranks_equal(one[token].rank, two[token].rank)]
        trades -= len(away)
        if trades < 0 or any(None in ranks or abs(ranks[0] - ranks[1]) > 1 for ranks in away):
            return False
    return True


def _close(want: Logprob, got: Logprob) -> bool:
    value = abs(want.logprob - got.logprob) < 1e-4 or want.logprob == got.logprob  # infinities are equal, not close
    return value and want.decoded_token == got.decoded_token


def _ranks_equal(want: int | None, got: int | None) -> bool:
    """Compare ranks; far down a real vocabulary, tokens a hundred-thousandth apart trade places by rounding."""
    if want is None or got is None or want <= 100:
        return want == got
    return abs(want - got) <= 1 + want // 1000


def describe(request: Request) -> str:
    """Return a request as one line of JSON."""
    return json.dumps(vars(request))

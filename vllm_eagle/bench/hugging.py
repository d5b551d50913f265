"""Hugging Face `generate` as a contestant, with and without prompt lookup; one request at a time."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from vllm_eagle.bench.child import Answer, Job, Outcome, Settings, pace, serve
from vllm_eagle.bench.contestants import parse

LOOKUP = 10


class _Clock(BaseStreamer):
    """Note when tokens come; the first thing handed over is the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to show."""


def start(settings: Settings) -> Answer:
    """Load the model."""
    contestant = parse(settings.contestant)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    model.eval()
    lookup = {"prompt_lookup_num_tokens": contestant.size or LOOKUP} if contestant.kind == "hf-lookup" else {}
    end = model.generation_config.eos_token_id
    extra = {**lookup, "pad_token_id": end[0] if isinstance(end, list) else end}
    return lambda job: _answer_all(model, job, extra)


@torch.inference_mode()
def _answer_all(model: Any, job: Job, extra: dict[str, Any]) -> Outcome:
    ids: list[list[int]] = []
    first: list[float] = []
    rest: list[float] = []
    steps = 0
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if job.temperature > 0:
        sampling = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
    began = time.perf_counter()
    for number, prompt in enumerate(job.prompts):
        torch.manual_seed(number)
        clock, asked = _Clock(), time.perf_counter()
        text = torch.tensor([list(prompt)])
        out = model.generate(
            text, attention_mask=torch.ones_like(text), max_new_tokens=job.tokens, streamer=clock, **sampling, **extra
        )
        ids.append(out[0, len(prompt) :].tolist())
        to_first, per_token = pace(asked, clock.moments[1:], len(ids[-1]))
        first.append(to_first)
        rest += per_token
        steps += len(clock.moments) - 1
    seconds = time.perf_counter() - began
    if "prompt_lookup_num_tokens" not in extra:
        return Outcome(seconds, ids, first, rest)
    return Outcome(seconds, ids, first, rest, drafts=steps, accepted=sum(map(len, ids)) - steps)


if __name__ == "__main__":
    serve(start)

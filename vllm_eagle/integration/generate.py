"""Stream answers out of vLLM with the batch kept full, and the target's states with them where they are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from vllm_eagle.errors import EagleError
from vllm_eagle.integration.capturing import MARK
from vllm_eagle.names import CAPTURE_WORKER
from vllm_eagle.train.answers import Answer, Question
from vllm_eagle.train.features import Example
from vllm_eagle.train.shards import Captured


def can_capture(dtype: str) -> bool:
    """Tell whether an engine of this dtype can capture while it answers: on a CPU, in float32, as `capture` does."""
    return current_platform.is_cpu() and dtype in ("auto", "float32")


def start_target(model: Path, max_model_len: int, batch: int, dtype: str, seed: int, capture: bool = False) -> LLM:
    """Start vLLM on `model` for `batch` sequences of up to `max_model_len` tokens at once.

    With `capture` its answers can bring their states; raises `EagleError` where that cannot be.
    """
    extra: dict[str, Any] = {}
    if capture:
        if not can_capture(dtype):
            raise EagleError("--capture works on a CPU with --dtype float32; leave it out and run the capture step afterwards")
        dtype, extra = "float32", {"worker_cls": CAPTURE_WORKER, "enable_prefix_caching": False}
    return LLM(
        str(model),
        seed=seed,
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=max_model_len,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, max_model_len),
        enforce_eager=True,
        disable_log_stats=True,
        **extra,
    )


def stream_answers(
    llm: LLM, questions: Iterable[Question], batch: int, capture: bool = False
) -> Iterator[tuple[Answer, Captured | None]]:
    """Yield each answer as it ends, in no fixed order; a new question takes the place of a finished one.

    No top-p or top-k is applied. The answer includes the end-of-turn token when the target wrote it. With `capture`, which
    the engine must have been started for, its states come with it.
    """
    waiting = iter(questions)
    running: dict[str, Question] = {}
    ended: list[Answer] = []
    while True:
        while len(running) < batch and (question := next(waiting, None)) is not None:
            running[question.id] = question
            _submit(llm, question, capture)
        yield from zip(ended, _take(llm, ended) if capture else [None] * len(ended), strict=True)
        if not running:
            return
        outputs = [output for output in llm.llm_engine.step() if output.finished]
        ended = [_answer(running.pop(output.request_id), output) for output in outputs]


def _submit(llm: LLM, question: Question, capture: bool) -> None:
    # No seed per request: vLLM 0.32 rewinds such a generator after a chunked prefill, which a CPU generator cannot do.
    extra = {MARK: question.id} if capture else None
    params = SamplingParams(
        temperature=question.temperature, max_tokens=question.max_tokens, detokenize=False, extra_args=extra
    )
    llm.llm_engine.add_request(question.id, {"prompt_token_ids": list(question.prompt_ids)}, params)


def _answer(question: Question, output: Any) -> Answer:
    return Answer(question.id, question.prompt_ids, tuple(output.outputs[0].token_ids), question.temperature)


def _take(llm: LLM, answers: list[Answer]) -> list[Captured]:
    """Fetch the states of answers from the worker, in one call for all that ended in a step."""
    if not answers:
        return []
    [found] = llm.collective_rpc("take_captured", args=([(answer.id, len(answer.out_ids)) for answer in answers],))
    return [_captured(answer, *states) for answer, states in zip(answers, found, strict=True)]


def _captured(answer: Answer, states: bytes, checked: int, reproduced: int) -> Captured:
    tensors = load(states)
    example = Example(torch.tensor(answer.token_ids), tensors["features"], tensors["top_ids"].long(), tensors["top_probs"])
    return Captured(example, checked=checked, reproduced=reproduced)

"""Stream answers out of vLLM with the batch kept full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_eagle.train.answers import Answer, Question


def start_target(model: Path, max_model_len: int, batch: int, dtype: str, seed: int) -> LLM:
    """Start vLLM on `model` for `batch` sequences of up to `max_model_len` tokens at once."""
    return LLM(
        str(model),
        seed=seed,
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=max_model_len,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, max_model_len),
        enforce_eager=True,
        disable_log_stats=True,
    )


def stream_answers(llm: LLM, questions: Iterable[Question], batch: int) -> Iterator[Answer]:
    """Yield each answer as it ends, in no fixed order; a new question takes the place of a finished one.

    No top-p or top-k is applied. The answer includes the end-of-turn token when the target wrote it.
    """
    engine, waiting = llm.llm_engine, iter(questions)
    running: dict[str, Question] = {}
    while True:
        while len(running) < batch and (question := next(waiting, None)) is not None:
            running[question.id] = question
            _submit(engine, question)
        if not running:
            return
        for output in engine.step():
            if output.finished:
                question = running.pop(output.request_id)
                out_ids = tuple(output.outputs[0].token_ids)
                yield Answer(question.id, question.prompt_ids, out_ids, question.temperature)


def _submit(engine: LLMEngine, question: Question) -> None:
    # No seed per request: vLLM 0.32 rewinds such a generator after a chunked prefill, which a CPU generator cannot do.
    params = SamplingParams(temperature=question.temperature, max_tokens=question.max_tokens, detokenize=False)
    engine.add_request(question.id, {"prompt_token_ids": list(question.prompt_ids)}, params)

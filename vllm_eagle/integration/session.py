"""One in-process engine that answers one chat prompt at a time and says how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_eagle.speculate import speculate


@dataclass(frozen=True)
class Answer:
    """What an engine wrote."""

    ids: list[int]
    seconds: float
    steps: int
    """Engine steps after the one that read the prompt."""


class Session:
    """Answer one prompt after the other, with trees if a head is given."""

    def __init__(self, model: Path, tokens: int, head: Path | None = None, **tree: Any) -> None:
        """`tokens` is the longest answer; `tree` are options of `vllm_eagle.speculate`."""
        extra = {} if head is None else speculate(str(head), **tree)
        self.tokens, self.asked = tokens, 0
        self.llm = LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=1,
            disable_log_stats=True,
            enable_prefix_caching=False,
            **extra,
        )

    def answer(
        self, prompt: str, limit: int | None = None, on_text: Callable[[str], None] | None = None, **sampling: Any
    ) -> Answer:
        """Answer one prompt, at most `limit` tokens, handing pieces of text to `on_text` as they come.

        `sampling` are further fields of `SamplingParams`; without them it answers greedily.
        """
        tokenizer = self.llm.get_tokenizer()
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        self.asked += 1
        engine, ids, steps = self.llm.llm_engine, [], -1
        sampling = {"temperature": 0, "max_tokens": limit or self.tokens} | sampling
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
        began = time.perf_counter()
        engine.add_request(str(self.asked), {"prompt_token_ids": asked}, params)
        while engine.has_unfinished_requests():
            for out in engine.step():
                ids += out.outputs[0].token_ids
                if on_text is not None:
                    on_text(out.outputs[0].text)
            steps += 1
        return Answer(ids, time.perf_counter() - began, max(0, steps))

    def settle(self) -> None:
        """Let the worker hear that the last answer has ended: it is told with the next step."""
        self.llm.llm_engine.step()

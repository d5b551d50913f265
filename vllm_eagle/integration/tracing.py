"""Keep the steps of requests that ask for it, and write a page for each when it ends."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_eagle.config import Options
from vllm_eagle.integration.measures import COMMIT, DRAFT, VERIFY
from vllm_eagle.integration.step import Step
from vllm_eagle.trace import Trace, TracedStep, page

logger = logging.getLogger(__name__)

TRACE_KEY = "speculative_trace"
"""Key of a request's `extra_args` (over HTTP: `vllm_xargs`): true for a page about its answer."""


def check_trace_wish(params: SamplingParams) -> None:
    """Check a request's own wish when it is admitted; raises `VLLMValidationError`, which a server answers with status 400."""
    wish: Any = (params.extra_args or {}).get(TRACE_KEY, False)
    if wish not in (True, False):  # 1 and 0 are what vllm_xargs makes of them
        raise VLLMValidationError(
            f"{TRACE_KEY}={wish!r}: want true for a page about this request, or false", parameter=TRACE_KEY
        )


def wants_trace(params: SamplingParams | None) -> bool:
    """Tell whether a request asks for a page."""
    return bool(((params.extra_args if params else None) or {}).get(TRACE_KEY))


class Tracer:
    """Write pages into a folder; nothing that goes wrong here touches an answer."""

    def __init__(self, folder: Path, config: VllmConfig, head: str) -> None:
        """`head` is what the pages call it."""
        self._folder, self._config, self._head = folder, config, head
        self._traces: dict[str, Trace] = {}
        self._drafted = 0.0  # milliseconds that this step's trees took, in the step before

    @classmethod
    def of(cls, config: VllmConfig, options: Options) -> Tracer | None:
        """Return the tracer these options ask for."""
        head = options.drafter if options.model is None else Path(options.model).name
        return None if options.trace is None else cls(Path(options.trace), config, head)

    def observe(self, step: Step, requests: dict[str, Any], names: list[str], seconds: dict[str, float]) -> None:
        """Take a step that is over; `requests` are vLLM's states, `names` the batch's in order."""
        took = {part: 1e3 * seconds.get(part, 0.0) for part in (DRAFT, VERIFY, COMMIT)}
        drafted, self._drafted = self._drafted, took[DRAFT]
        for r, name in enumerate(names):
            if not wants_trace(requests[name].sampling_params):
                continue
            trace = self._traces.setdefault(name, Trace(name, Path(self._config.model_config.model).name, self._head, []))
            trace.steps.append(_traced(step, r, requests[name], drafted, took))

    def finish(self, name: str, params: SamplingParams | None) -> None:
        """Write the page of a request that has ended."""
        trace = self._traces.pop(name, None)
        if trace is None or params is None:
            return
        path = self._folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:120]}.html"
        try:
            path.write_text(self._page(trace, params), encoding="utf-8")
            logger.info("how the answer of %s came is shown in %s", name, path)
        except Exception:
            logger.exception("the page about request %s cannot be written to %s", name, path)

    def _page(self, trace: Trace, params: SamplingParams) -> str:
        tokenizer = cached_tokenizer_from_config(self._config.model_config)
        stops = [*(params.stop_token_ids or ()), *([] if params.eos_token_id is None else [params.eos_token_id])]
        trace = trace.cut_at(stops, params.max_tokens)
        if tokenizer is None:
            return page(trace, {token: f"#{token}" for token in trace.tokens()})
        return page(trace, {token: tokenizer.decode([token]) for token in trace.tokens()})


def _traced(step: Step, r: int, request: Any, drafted: float, took: dict[str, float]) -> TracedStep:
    """Describe one request's part of a step."""
    assert step.walk is not None
    tree, emitted = step.trees[r], step.walk.emitted[r]
    if tree is None:
        last = request.get_token_id(int(step.computed[r] + step.counts[r]) - 1)
        tokens, parents, guesses = [last], [-1], [1.0]
    else:
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        guesses = [1.0] * len(tokens) if tree.guesses is None else tree.guesses.tolist()
    return TracedStep(
        tokens=tokens,
        parents=parents,
        guesses=guesses,
        accepted=list(step.walk.paths[r]),
        emitted=list(emitted),
        rows=int(step.counts[r]),
        requests=len(step.trees),
        draft_ms=drafted if tree is not None else 0.0,
        verify_ms=took[VERIFY],
        commit_ms=took[COMMIT],
    )

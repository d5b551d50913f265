"""Keep the target's states while it answers: the forward pass has computed them, a second one would double the price.

position   0  1  …  P-1  |  P   P+1  …            P prompt tokens, then the answer
feature    f0 f1 …  fP-1 |  fP  fP+1 …            every scheduled position, in float16 at once
best       ·  ·  …  r0   |  r1  r2   …            after the last scheduled position of a step, from its raw logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_eagle.errors import EagleError
from vllm_eagle.integration import ledger
from vllm_eagle.train.features import best_tokens
from vllm_eagle.train.shards import CANDIDATES, CHECK_EVERY

MARK = "vllm_eagle_capture"
"""Key of a request's `extra_args`; its value names the states to take when the request has ended."""


@dataclass(frozen=True)
class States:
    """Hold the states of one request, for its longest answer: L positions, at most M answer tokens, K candidates."""

    prompt: int
    features: Tensor  # [L, D] float16, NaN where the position was not computed yet
    top_ids: Tensor  # [M, K] int32
    top_probs: Tensor  # [M, K] float16

    @classmethod
    def empty(cls, prompt: int, most: int, hidden: int, candidates: int) -> States:
        """Make room for a prompt and an answer of at most `most` tokens."""
        features = torch.full((prompt + most, hidden), torch.nan, dtype=torch.float16)
        top_probs = torch.full((most, candidates), torch.nan, dtype=torch.float16)
        return cls(prompt, features, torch.zeros(most, candidates, dtype=torch.int32), top_probs)

    def put(self, first: int, features: Tensor, ids: Tensor, probs: Tensor) -> None:
        """Keep features [n, D] from position `first` on, and the best tokens [K] after the last; a later call overwrites."""
        end = first + len(features)
        self.features[first:end] = features
        if end >= self.prompt:
            self.top_ids[end - self.prompt] = ids
            self.top_probs[end - self.prompt] = probs

    def of(self, answer: int) -> dict[str, Tensor]:
        """Return what belongs to an answer of so many tokens: features [P+answer-1, D], best tokens [answer, K]."""
        features, top_probs = self.features[: self.prompt + answer - 1], self.top_probs[:answer]
        assert not features.isnan().any() and not top_probs.isnan().any(), "a position of the answer was never computed"
        return {"features": features, "top_ids": self.top_ids[:answer], "top_probs": top_probs}


class CaptureRunner(CPUModelRunner):
    """Keep the states of marked requests; they stay here until they are taken."""

    def adopt(self) -> None:
        """Make a freshly built `CPUModelRunner` into this class (its worker builds it inline)."""
        self._states: dict[str, States] = {}
        self._taken = 0

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep what the forward pass left, before the sampler changes the logits in place."""
        if self.execute_model_state is not None:
            self._keep(self.execute_model_state)
        return super().sample_tokens(grammar_output)

    def _keep(self, step: Any) -> None:
        requests, marks = self.input_batch.req_ids, [self._mark(request) for request in self.input_batch.req_ids]
        if not any(marks):
            return
        counts = [step.scheduler_output.num_scheduled_tokens[request] for request in requests]
        features = step.hidden_states[: sum(counts)].split(counts)
        ids, probs = best_tokens(step.logits, CANDIDATES)  # [R, K], one row for each request
        for row, mark in enumerate(marks):
            if mark is not None:
                if mark not in self._states:
                    self._states[mark] = self._room(requests[row], features[row].shape[-1], ids.shape[-1])
                first = int(self.input_batch.num_computed_tokens_cpu[row])
                self._states[mark].put(first, features[row], ids[row], probs[row])

    def _mark(self, request: str) -> str | None:
        return (self.requests[request].sampling_params.extra_args or {}).get(MARK)

    def _room(self, request: str, hidden: int, candidates: int) -> States:
        state = self.requests[request]
        return States.empty(len(state.prompt_token_ids), state.sampling_params.max_tokens, hidden, candidates)

    @torch.inference_mode()
    def take(self, mark: str, answer: int) -> tuple[bytes, int, int]:
        """Hand out and forget the states of an ended request, and how many argmaxes were checked and reproduced."""
        states = self._states.pop(mark)
        found = states.of(answer)
        checked = reproduced = 0
        if self._taken % CHECK_EVERY == 0:
            again = self.model.compute_logits(found["features"][states.prompt - 1 :].to(self.dtype)).argmax(-1)
            checked, reproduced = answer, int((again == found["top_ids"][:, 0]).sum())
        self._taken += 1
        return save(found), checked, reproduced


class CPUCaptureWorker(CPUWorker):
    """Generate on CPU and keep what training needs; prefix caching must be off, a hit would leave a hole."""

    def init_device(self) -> None:
        """Build vLLM's runner, then adopt it; raises `EagleError` if vLLM built another one."""
        ledger.check()
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise EagleError(f"capturing needs vLLM's V1 CPU runner, not {type(self.model_runner).__name__}")
        self.model_runner.__class__ = CaptureRunner
        self.model_runner.adopt()

    def take_captured(self, ended: list[tuple[str, int]]) -> list[tuple[bytes, int, int]]:
        """Hand out the states of ended requests, given as marks and lengths of answers, as bytes of a safetensors file."""
        return [self.model_runner.take(mark, answer) for mark, answer in ended]

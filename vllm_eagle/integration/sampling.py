"""vLLM's sampler as the walk's `SampleLevel`: one level of all trees, with the metadata plain decoding would have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_eagle.drafting import Draws
from vllm_eagle.drafting.noise import gumbel, peek
from vllm_eagle.verify import STOPPED, Walk


class LevelSampler:
    """Draw one token per request from the logits of its current tree row.

    `outputs` are the requests' live output lists: every logits processor and penalty of vLLM reads history through
    them, so while the walk goes on they hold what has been accepted, and are put back after it.
    """

    def __init__(
        self,
        sampler: Sampler,
        metadata: SamplingMetadata,
        logits: Tensor,
        first_rows: NDArray[np.int64],
        outputs: Sequence[list[int]],
    ) -> None:
        """`logits` [sum of rows, V]; `first_rows` [R] is each request's root row in them."""
        self.sampler, self.metadata, self.logits = sampler, metadata, logits
        self.first_rows, self.outputs = first_rows, outputs
        self.logprobs: list[LogprobsTensors] = []

    def __call__(self, rows: NDArray[np.int64], emitted: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """See `SampleLevel`."""
        if any(emitted):
            self._advance(rows, emitted)
        here = torch.from_numpy(self.first_rows + np.maximum(rows, 0))
        taking_part = {r: g for r, g in self.metadata.generators.items() if rows[r] != STOPPED}
        metadata = dataclasses.replace(
            self.metadata, generators=taking_part, spec_token_ids=[[] for _ in rows] if self.metadata.spec_token_ids else None
        )
        out = self.sampler(logits=self.logits[here], sampling_metadata=metadata)
        if out.logprobs_tensors is not None:
            self.logprobs.append(out.logprobs_tensors)
        return out.sampled_token_ids[:, 0].cpu().numpy().astype(np.int64)  # type: ignore[no-any-return]

    def _advance(self, rows: NDArray[np.int64], emitted: Sequence[Sequence[int]]) -> None:
        """Tell the requests still walking, and the processors, of the token that took them here."""
        for r in np.flatnonzero(rows != STOPPED):
            self.outputs[r].append(emitted[r][-1])
        for processor in self.metadata.logitsprocs.all:
            processor.update_state(None)

    @contextmanager
    def histories(self) -> Iterator[None]:
        """Restore the output lists at the end: the runner's bookkeeping appends the emitted tokens itself."""
        lengths = [len(output) for output in self.outputs]
        try:
            yield
        finally:
            for output, length in zip(self.outputs, lengths, strict=True):
                del output[length:]


def noise_is_ours(sampler: Sampler) -> bool:
    """Tell whether `gumbel` is the noise this sampler draws with: on a few rows both must choose the same tokens."""
    if sampler.topk_topp_sampler.use_fp64_gumbel or not hasattr(torch.ops._C, "fused_gumbel_argmax"):
        return False
    logits, seeds = torch.linspace(-3, 3, 16 * 500).view(16, 500).roll(37, 1).contiguous(), torch.arange(16) * 1_000_003
    drawn = torch.ops._C.fused_gumbel_argmax(logits, seeds)
    return torch.equal(drawn, (logits + gumbel(seeds, torch.arange(500))).argmax(1))


def seed_the_unseeded(batch: InputBatch) -> None:
    """Give every request that draws a generator of its own, so that what it draws next can be read ahead."""
    for r, request in enumerate(batch.req_ids):
        if request in batch.random_reqs and r not in batch.generators:
            batch.generators[r] = torch.Generator().manual_seed(int(torch.randint(2**62, (1,))))


def peek_draws(batch: InputBatch, ahead: int) -> Draws | None:
    """Return how each request of the batch will draw its next tokens, None when all take the best."""
    if not batch.random_reqs:
        return None
    seeds = torch.zeros(batch.num_reqs, ahead, dtype=torch.long)
    for r, request in enumerate(batch.req_ids):
        if request in batch.random_reqs:
            seeds[r] = peek(batch.generators[r], ahead)
    return Draws(torch.from_numpy(batch.temperature_cpu[: batch.num_reqs].copy()), seeds)


def is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Tell whether every token is simply the argmax of its logits, whatever was emitted before it."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not (holder is not None and holder.has_tracked_requests())
        and all(map(_is_idle, metadata.logitsprocs.non_argmax_invariant))
    )


def _is_idle(processor: object) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return False


def best_of_rows(
    greedy: Callable[[Tensor], Tensor], logits: Tensor, first_rows: NDArray[np.int64], counts: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Return the best token of every row, request by request."""
    best = greedy(logits.to(torch.float32)).numpy().astype(np.int64)
    return [best[first : first + count] for first, count in zip(first_rows, counts, strict=True)]


def to_output(walk: Walk, logprobs: Sequence[LogprobsTensors]) -> SamplerOutput:
    """Lay out a walk as vLLM's speculative sampler does: tokens [R, W] padded with -1, logprobs rows in that order."""
    width = max(1, max(map(len, walk.emitted)))
    tokens = torch.tensor([row + [STOPPED] * (width - len(row)) for row in walk.emitted], dtype=torch.int32)
    stacked = None
    if logprobs:
        stacked = LogprobsTensors(
            *(torch.stack(level, 1).flatten(0, 1) for level in zip(*map(_tensors, logprobs), strict=True))
        )
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=stacked)


def _tensors(level: LogprobsTensors) -> tuple[Tensor, Tensor, Tensor]:
    return level.logprob_token_ids, level.logprobs, level.selected_token_ranks

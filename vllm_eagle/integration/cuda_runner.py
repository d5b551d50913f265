"""The tree runner on CUDA: what differs from the CPU's. Not run on a GPU; its parts are tested on CPU tensors.

    inputs    trees go to the device into tensors that never move
    walk      greedy, or drawn without history: on the device, all levels without a wait; else level by level, as on the CPU
    commit    one launch, from indices made on the device
    drafting  on the device; trees come to the host once, since the scheduler takes lists

From the walk to the commit nothing waits for the device: vLLM's own copy of the tokens comes behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_eagle.attention.device import KeptRows, StaticRows, TritonTreeAttention
from vllm_eagle.errors import EagleError
from vllm_eagle.integration.cuda_attention import DeviceTrees, TreeFlashAttentionImpl, TreeTritonAttentionImpl
from vllm_eagle.integration.measures import COMMIT, VERIFY, timed
from vllm_eagle.integration.runner import TreeSteps
from vllm_eagle.integration.sampling import is_plain_greedy
from vllm_eagle.integration.step import Step
from vllm_eagle.tree import TreeRows
from vllm_eagle.verify import retrace
from vllm_eagle.verify.device import DeviceWalk, SampleOnDevice, accepted_places, greedy, tree_table, walk_on_device


class DeviceSteps(TreeSteps):
    """Keep a step on the device: no tensor comes to the host before the tokens do."""

    _rows: StaticRows
    _kept: KeptRows
    _walk: DeviceWalk | None = None
    _draws: DeviceLevelSampler | None = None

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        step = self._step
        self._rows.fill([step.laid.get(r) for r in range(len(step.trees))], step.starts.tolist(), step.computed.tolist())
        self._tables = tree_table(step.trees, self.num_spec_tokens + 1).to(self.device, non_blocking=True)
        return prepared

    def _lay_out(self, step: Step, block_table: Tensor) -> TreeRows:
        return self._rows.over(block_table)

    def _attach(self, rows: TreeRows, index: Tensor, plain: Any, plain_index: Tensor) -> DeviceTrees:
        return DeviceTrees(self.tree_attention, rows, index, plain, plain_index, self._rows.first_rows, self._kept)

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        metadata = self.input_batch.sampling_metadata
        assert logits is not None
        ends = spec_decode_metadata.cu_num_sampled_tokens.long()  # [R]
        first_rows = torch.cat((ends.new_zeros(1), ends[:-1]))
        self._walk = self._draws = None
        if is_plain_greedy(metadata):
            sample = greedy(self.sampler.greedy_sample(logits.to(torch.float32)), first_rows)
        elif draws_without_history(metadata):
            self._draws = sample = DeviceLevelSampler(self.sampler, metadata, logits, first_rows)
        else:
            return super()._sample(logits, spec_decode_metadata)
        return self._walk_without_waiting(sample)

    @timed(VERIFY)
    def _walk_without_waiting(self, sample: SampleOnDevice) -> SamplerOutput:
        step = self._step
        assert step is not None
        levels = 1 + max((int(tree.depths.max()) for tree in step.trees if tree is not None), default=0)
        taking_part = ~self.discard_request_mask.gpu[: len(step.trees)]
        self._walk = walk_on_device(self._tables, taking_part, sample, levels)
        return SamplerOutput(self._walk.emitted.to(torch.int32), None if self._draws is None else self._draws.stacked())

    @timed(COMMIT)
    def _commit(self, step: Step) -> None:
        slots = torch.stack([step.slots[group] for group in range(len(step.slots))])
        if self._walk is None:
            source, target = (x.to(self.device) for x in step.accepted())
            self._kept.commit(source, slots[:, target])
            return
        starts = torch.from_numpy(step.starts).to(self.device, non_blocking=True)
        self._kept.commit(*accepted_places(self._walk.paths, self._rows.first_rows[:-1], starts, slots))

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> Any:
        """Take the walk back from the tokens vLLM has brought to the host, then draft."""
        step = self._step
        if step.walk is None:
            step.walk = retrace(step.trees, sampled_token_ids)
        if self._draws is not None:
            self._draws.rewind([len(tokens) for tokens in sampled_token_ids])
        return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args, **kwargs)


class CUDATreeRunner(DeviceSteps, GPUModelRunner):
    """Serve trees on CUDA."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.adopt()

    def _choose_attention(self) -> TritonTreeAttention:
        layers = {name: x for name, x in self.compilation_config.static_forward_context.items() if isinstance(x, Attention)}
        for name, layer in layers.items():
            if not isinstance(layer.impl, TreeFlashAttentionImpl | TreeTritonAttentionImpl):
                raise EagleError(
                    f"layer {name} attends through {type(layer.impl).__name__}, which cannot verify trees;"
                    " use --attention-backend FLASH_ATTN or TRITON_ATTN"
                )
        groups = {name: i for i, found in enumerate(self.attn_groups) for group in found for name in group.layer_names}
        rows = min(self.max_num_reqs * (self.num_spec_tokens + 1), self.max_num_tokens)
        head = {layer.layer_name for layer in self.drafter.layers}  # writes its own K/V while drafting
        self._kept = KeptRows({name: layer.kv_cache for name, layer in layers.items() if name not in head}, groups, rows)
        self._rows = StaticRows(self.max_num_reqs, self.num_spec_tokens + 1, self.device)
        return TritonTreeAttention(torch.cuda.get_device_properties(self.device).multi_processor_count)


class DeviceLevelSampler:
    """Draw one token per request and level with vLLM's sampler, without a look at what was drawn (see `SampleOnDevice`).

    Requests that have stopped draw on; once the host knows where each stopped, `rewind` puts their generators back.
    """

    def __init__(self, sampler: Sampler, metadata: SamplingMetadata, logits: Tensor, first_rows: Tensor) -> None:
        """`logits` [sum of rows, V]; `first_rows` [R] is each request's root row in them, on their device."""
        no_drafts = [[] for _ in range(len(first_rows))] if metadata.spec_token_ids else None
        self.sampler, self.metadata = sampler, dataclasses.replace(metadata, spec_token_ids=no_drafts)
        self.logits, self.first_rows = logits, first_rows
        self._logprobs: list[LogprobsTensors] = []
        self._before: list[dict[int, Any]] = []  # [level][request] state of its generator

    def __call__(self, level: int, rows: Tensor) -> Tensor:
        """See `SampleOnDevice`."""
        self._before.append({r: _state(generator) for r, generator in self.metadata.generators.items()})
        out = self.sampler(logits=self.logits[self.first_rows + rows.clamp(min=0)], sampling_metadata=self.metadata)
        if out.logprobs_tensors is not None:
            self._logprobs.append(out.logprobs_tensors)
        return out.sampled_token_ids[:, 0].long()

    def stacked(self) -> LogprobsTensors | None:
        """Return logprobs as vLLM's speculative sampler lays them out: request by request, all levels of each."""
        if not self._logprobs:
            return None
        parts = zip(*((x.logprob_token_ids, x.logprobs, x.selected_token_ranks) for x in self._logprobs), strict=True)
        return LogprobsTensors(*(torch.stack(levels, 1).flatten(0, 1) for levels in parts))

    def rewind(self, drawn: Sequence[int]) -> None:
        """Put each generator where it stood after the draws that count [R]."""
        for r, generator in self.metadata.generators.items():
            if drawn[r] < len(self._before):
                _restore(generator, self._before[drawn[r]][r])


def _state(generator: torch.Generator) -> Any:
    return generator.get_offset() if generator.device.type == "cuda" else generator.get_state()


def _restore(generator: torch.Generator, state: Any) -> None:
    if generator.device.type == "cuda":
        generator.set_offset(state)
    else:
        generator.set_state(state)


def draws_without_history(metadata: SamplingMetadata) -> bool:
    """Tell whether no request's draw hangs on the tokens before it other than through its logits."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.no_penalties
        and not metadata.bad_words_token_ids
        and not (holder is not None and holder.has_tracked_requests())
        and all(map(_is_blind, metadata.logitsprocs.all))
    )


def _is_blind(processor: object) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return type(processor) in (MinPLogitsProcessor, LogitBiasLogitsProcessor)

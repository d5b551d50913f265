"""vLLM's model runner with trees: overridden methods, most of them vLLM's own plus the tree's part."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_eagle import envs
from vllm_eagle.attention import TreeAttention
from vllm_eagle.control import Controller
from vllm_eagle.drafting import HeadDrafter, Known
from vllm_eagle.integration.attention import Trees
from vllm_eagle.integration.backlog import Backlog
from vllm_eagle.integration.head_cache import PagedHeadCache
from vllm_eagle.integration.limits import room, wished_size
from vllm_eagle.integration.measures import COMMIT, DRAFT, VERIFY, Measures, timed
from vllm_eagle.integration.pace import Pace, measure_costs
from vllm_eagle.integration.parallel import is_first
from vllm_eagle.integration.proposer import TreeProposer
from vllm_eagle.integration.sampling import (
    LevelSampler,
    best_of_rows,
    is_plain_greedy,
    noise_is_ours,
    peek_draws,
    seed_the_unseeded,
    to_output,
)
from vllm_eagle.integration.scheduler import PLACEHOLDER, TreeDrafts
from vllm_eagle.integration.startup import choose_attention
from vllm_eagle.integration.step import Step
from vllm_eagle.integration.thinking import count_thinking
from vllm_eagle.integration.tracing import Tracer
from vllm_eagle.integration.watch import AcceptanceWatch
from vllm_eagle.tree import DraftTree, TreeRows
from vllm_eagle.verify import walk, walk_greedy

logger = logging.getLogger(__name__)


class TreeSteps:
    """Verify and draft trees beside vLLM's runner; requests are keyed by id, their batch index is looked up anew every step."""

    drafter: TreeProposer
    tree_attention: TreeAttention

    def adopt(self) -> None:
        """Make a freshly built `CPUModelRunner` into this class (its worker builds it inline)."""
        self._trees: dict[str, DraftTree] = {}
        self._step: Step | None = None  # from a step's inputs to its drafts
        self._metadata: dict[str, Any] = {}
        self._warned = False
        self._backlog = Backlog()
        self._pace: Pace | None = None  # trees of a fixed size have none
        self._failed: set[str] = set()  # requests whose drafting failed, each told of once
        self._watch = AcceptanceWatch(self.drafter.options.model)
        self._tracer = Tracer.of(self.vllm_config, self.drafter.options) if is_first() else None
        self.seconds: dict[str, float] = {}  # of this step, by part
        self._shares_noise = envs.shares_noise() and noise_is_ours(self.sampler)
        self.use_aux_hidden_state_outputs = bool(self.drafter.aux_layers)

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        return self.drafter.aux_layers

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Choose the tree attention once the cache and its layout are known."""
        super().initialize_kv_cache(*args, **kwargs)  # may make the batch anew
        count_thinking(self.input_batch, self.vllm_config)
        self.tree_attention = self._choose_attention()
        self.drafter.bind(self)

    def _choose_attention(self) -> TreeAttention:
        return choose_attention(self.compilation_config.static_forward_context)

    def measure(self) -> None:
        """Measure what steps cost, where trees follow the load."""
        drafter = self.drafter.drafter
        if self.drafter.options.adaptive and isinstance(drafter, HeadDrafter):
            growth = drafter.growth
            drafter.pricing = controller = Controller(measure_costs(self, drafter), growth.size, growth.depth)
            self._pace = Pace(controller)

    def step_costs(self) -> tuple[list[float], list[float]] | None:
        """Return rows and the seconds expected of a step with them, as the controller sees it now."""
        return None if self._pace is None else self._pace.controller.costs.verify.points()

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self._trees.pop(req_id, None)
        self._backlog.drop(req_id)
        self._failed.discard(req_id)
        if self._tracer is not None:
            self._tracer.finish(req_id, req_state.sampling_params)

    # The whole step ----------------------------------------------------------------------------------------------

    @timed(VERIFY)
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target over roots and nodes."""
        self.seconds = {}
        if self._pace is not None:
            self._pace.take(scheduler_output.seen)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Walk, commit and draft; what was measured leaves with the output."""
        step, names = self._step, list(self.input_batch.req_ids)
        output = super().sample_tokens(grammar_output)
        if step is not None:
            depths = {names[r]: int(tree.depths.max()) for r, tree in enumerate(step.trees) if tree is not None}
            seconds = {part: s for part, s in self.seconds.items() if depths or part != VERIFY}
            seen = [] if self._pace is None else self._pace.leave()
            output.measures = Measures([len(nodes) for nodes in self._draft_token_ids or [] if nodes], depths, seconds, seen)
            if self._tracer is not None:
                self._tracer.observe(step, self.requests, names, self.seconds)
        return output

    # Before the forward pass -------------------------------------------------------------------------------------

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        if self._pace is not None:
            self._pace.begin_step(self.input_batch.req_ids)
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        count, total = self.input_batch.num_reqs, scheduler_output.total_num_scheduled_tokens
        drafts, kept = scheduler_output.scheduled_spec_decode_tokens, scheduler_output.kept_rows
        parents = scheduler_output.parents
        tables = self.input_batch.block_table.block_tables
        self._step = step = Step(
            trees=[
                self._scheduled_tree(request, drafts.get(request), kept.get(request), parents.get(request))
                for request in self.input_batch.req_ids
            ],
            starts=self.query_start_loc.np[:count].copy(),
            counts=num_scheduled_tokens[:count],
            computed=self.input_batch.num_computed_tokens_cpu[:count].copy(),
            slots={group: table.slot_mapping.gpu[:total].clone() for group, table in enumerate(tables)},
        )
        if step.owners:
            rows, positions = (x.to(self.device, non_blocking=True) for x in step.positions())
            self.positions[rows] = positions
            nodes = step.node_rows().to(self.device, non_blocking=True)
            for table in tables:
                table.slot_mapping.gpu[nodes] = -1
        return prepared

    def _scheduled_tree(
        self, request: str, drafts: list[int] | None, kept: list[int] | None, parents: list[int] | None
    ) -> DraftTree | None:
        """Return the tree behind the scheduled drafts: of the rows a grammar kept, a prefix, since the scheduler may cut it.

        It is the scheduler's, so that several ranks verify one and the same; the head's guesses are taken from our own.
        """
        if not drafts:
            return None
        if drafts[0] == PLACEHOLDER or parents is None:
            return DraftTree.chain(0, drafts)
        own = self._trees.get(request)
        if own is not None and kept is not None and kept[-1] < len(own.tokens):
            own = own.subset(kept)
        if own is not None and own.size >= len(drafts):
            own = own.prefix(len(drafts))
            if own.nodes == drafts and own.parents[1:].tolist() == parents:
                return own
        if not self._warned:
            logger.warning("drafts of request %s are not those proposed here; its tree is the scheduler's", request)
            self._warned = True
        return DraftTree.build([0, *drafts], [-1, *parents])

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        step = self._step
        if step is not None and step.owners and not kwargs.get("for_cudagraph_capture"):
            index, others = step.positions()[0].to(self.device), step.others()
            for group in (group for groups in self.attn_groups for group in groups):
                found = metadata[group.layer_names[0]]
                rows = self._lay_out(step, found.block_table)
                plain, plain_index = None, index
                if others:
                    plain_index, part = _part_of(found, others, self.query_start_loc.cpu)
                    plain = group.get_metadata_builder(0).build(0, part)
                found.trees = self._attach(rows, index, plain, plain_index)
        self._metadata = metadata
        return metadata, common

    def _lay_out(self, step: Step, block_table: Tensor) -> TreeRows:
        return step.tree_rows(block_table)

    def _attach(self, rows: TreeRows, index: Tensor, plain: Any, plain_index: Tensor) -> Any:
        return Trees(self.tree_attention, rows, index, plain, plain_index)

    # After it ----------------------------------------------------------------------------------------------------

    @timed(VERIFY)
    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        step = self._step
        assert step is not None and logits is not None
        metadata = self.input_batch.sampling_metadata
        taking_part = (~self.discard_request_mask.np[: len(step.trees)]).tolist()
        counts = np.array(spec_decode_metadata.num_draft_tokens, np.int64) + 1
        first_rows = counts.cumsum() - counts
        if is_plain_greedy(metadata):
            best = best_of_rows(self.sampler.greedy_sample, logits, first_rows, counts)
            step.walk = walk_greedy(step.trees, taking_part, best)
            return to_output(step.walk, [])
        if self._shares_noise:
            seed_the_unseeded(self.input_batch)
        outputs = [self.requests[request].output_token_ids for request in self.input_batch.req_ids]
        sampler = LevelSampler(self.sampler, metadata, logits, first_rows, outputs)
        with sampler.histories():
            step.walk = walk(step.trees, taking_part, sampler)
        return to_output(step.walk, sampler.logprobs)

    def _update_states_after_model_execute(self, output_token_ids: Tensor, scheduler_output: Any) -> None:
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)
        assert self._step is not None
        if self._step.owners:
            self._commit(self._step)

    @timed(COMMIT)
    def _commit(self, step: Step) -> None:
        """Write the accepted rows' K/V to the slots plain decoding would have used; the others were never written."""
        source, target = step.accepted()
        if len(source) == 0:
            return
        layers = self.compilation_config.static_forward_context
        for group_id, groups in enumerate(self.attn_groups):
            slots = step.slots[group_id][target]
            for name in (name for group in groups for name in group.layer_names):
                if (kept := self._metadata[name].trees.kept.get(name)) is not None:
                    layer = layers[name]
                    layer.impl.do_kv_cache_update(layer, kept[0][source], kept[1][source], layer.kv_cache, slots)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # A discarded row drew nothing here, so there is nothing to rewind; vLLM would, and CPU generators cannot.
        generators = self.input_batch.generators
        hidden = {
            int(r): generators.pop(int(r))
            for r in np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
            if int(r) in generators
        }
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)

    # Drafting ----------------------------------------------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return True  # each tree is cut to its own room instead

    @timed(DRAFT)
    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Grow one tree per request and hand out their nodes; the structure stays here.

        Whatever goes wrong in drafting costs this step's drafts: no text depends on them.
        """
        step, self._step = self._step, None
        assert step is not None and step.walk is not None
        self._watch.observe(step.walk, step.owners)
        states = self.drafter.states(hidden_states, aux_hidden_states)
        known = self._backlog.join(self._known(step, sampled_token_ids, states))
        try:
            trees = dict(zip(known.request_ids, self._draft(step, known), strict=True))
        except Exception:
            self._report_failure(known.request_ids)
            trees = dict(zip(known.request_ids, self._postpone(known), strict=True))
        self._trees.update(trees)
        if self._pace is not None:
            self._pace.end_step(known.request_ids)
        return [trees[request].nodes for request in known.request_ids]

    def _draft(self, step: Step, known: Known) -> list[DraftTree]:
        if self._pace is not None:
            self._pace.verified(step)
            if not self._pace.asks_for_drafts(step, known):
                if not self._pace.must_read(step, known):
                    return self._postpone(known)
                known = dataclasses.replace(known, rooms=[0] * len(known.rooms))
        draws = peek_draws(self.input_batch, self.drafter.growth.depth) if self._shares_noise and any(known.rooms) else None
        return self.drafter.drafter.draft(dataclasses.replace(known, draws=draws), PagedHeadCache(self, known))

    def _postpone(self, known: Known) -> list[DraftTree]:
        """Draft nothing now, at no cost; the head reads what it missed before its next drafts."""
        self._backlog.keep(known)
        return [DraftTree.build([root], [-1]) for root in known.roots.tolist()]

    def _report_failure(self, requests: Sequence[str]) -> None:
        fresh = [request for request in requests if request not in self._failed]
        if fresh:
            logger.exception("drafting failed in a step of %s; they go on without its drafts", ", ".join(fresh))
            self._failed.update(fresh)

    def take_draft_token_ids(self) -> TreeDrafts | None:
        """Hand the scheduler the structure with the drafts: it needs it where a grammar constrains them."""
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        parents = [self._trees[request].parents[1:].tolist() for request in drafts.req_ids]
        return TreeDrafts(drafts.req_ids, drafts.draft_token_ids, parents)

    def _known(self, step: Step, sampled: list[list[int]], states: Sequence[Tensor]) -> Known:
        batch = self.input_batch
        rows, positions, counts = step.known()
        index = torch.from_numpy(rows).to(self.device)
        owner = np.repeat(np.arange(len(counts)), counts)
        lengths = batch.num_tokens_no_spec[: len(counts)].tolist()
        return Known(
            request_ids=list(batch.req_ids),
            features=torch.cat([state[index] for state in states], dim=-1),
            next_tokens=torch.from_numpy(batch.token_ids_cpu[owner, positions + 1].astype(np.int64)).to(self.device),
            positions=torch.from_numpy(positions).to(self.device),
            lengths=torch.from_numpy(counts),
            rooms=[self._room(r, length) if sampled[r] else 0 for r, length in enumerate(lengths)],
            histories=[batch.token_ids_cpu[r, :length] for r, length in enumerate(lengths)],
        )

    def _room(self, index: int, length: int) -> int:
        """Count the nodes a request may draft whose prompt is finished."""
        wish = wished_size(self.requests[self.input_batch.req_ids[index]].sampling_params)
        return room(self.num_spec_tokens, wish, length, self.drafter.longest, self.max_model_len)


class TreeRunner(TreeSteps, CPUModelRunner):
    """Serve trees on CPU."""


def _part_of(metadata: Any, requests: list[int], starts: Tensor) -> tuple[Tensor, CommonAttentionMetadata]:
    """Return the batch rows of some requests, and the common metadata of a batch of them alone; `starts` [R+1] on the host."""
    device, chosen = metadata.seq_lens.device, torch.tensor(requests)
    lengths = (starts[1:] - starts[:-1])[chosen]
    index = torch.cat([torch.arange(int(starts[r]), int(starts[r + 1])) for r in requests]).to(device)
    begin = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)))
    seq_lens = metadata.seq_lens[chosen]
    return index, CommonAttentionMetadata(
        query_start_loc=begin.to(device),
        query_start_loc_cpu=begin,
        seq_lens=seq_lens,
        num_reqs=len(requests),
        num_actual_tokens=len(index),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=metadata.block_table[chosen].contiguous(),
        slot_mapping=metadata.slot_mapping[index],
    )

"""vLLM's scheduler with grammars that follow trees, and their numbers; everything else is its own.

runner     TreeDrafts: nodes and their parents
here       nodes the grammar refuses are pruned, so that none is verified in vain
runner     SchedulerOutput.kept_rows: which rows of the proposed tree are left, .parents: what hangs where, for every rank;
           ModelRunnerOutput.measures: sizes and times
here       TreeStats; SchedulerOutput.seen: the first rank's times, for every rank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_eagle.integration.grammar import allowed_rows, masks
from vllm_eagle.integration.measures import Measures
from vllm_eagle.integration.metrics import TreeStats
from vllm_eagle.integration.parallel import Seen
from vllm_eagle.tree import DraftTree

PLACEHOLDER = -1
"""Draft token with which vLLM pads a request that joins running ones with a single new token; never accepted."""


@dataclass
class TreeDrafts(DraftTokenIds):
    """Carry the drafts with their structure."""

    parents: list[list[int]]
    """[requests][nodes] row of each node's parent; the root is row 0, the first node row 1."""


@dataclass(frozen=True)
class _Pruned:
    rows: list[int]  # of the proposed tree
    tree: DraftTree


class TreeScheduler(Scheduler):
    """Prune and mask the trees of requests with structured output, and count all trees; name it with `--scheduler-cls`."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        for group in kv_cache_config.kv_cache_groups:
            group.is_eagle_group = not vllm_config.speculative_config.disable_eagle_block_drop  # type: ignore[union-attr]
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self._pruned: dict[str, _Pruned] = {}  # requests with structured output and a tree not verified yet
        self._parents: dict[str, list[int]] = {}  # of the nodes proposed last, by request
        self._measures: Measures | None = None  # of the step whose output is looked at
        self._seen: Seen = []
        self._discarded = 0

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the drafts of a step; vLLM would cut a constrained request's at the first sibling."""
        super().update_draft_token_ids(draft_token_ids)
        assert isinstance(draft_token_ids, TreeDrafts)
        self._parents.update(zip(draft_token_ids.req_ids, draft_token_ids.parents, strict=True))
        self._parents = {request: parents for request, parents in self._parents.items() if request in self.requests}
        for drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, draft_token_ids.parents, strict=True):
            self._prune(*drafts)
        self._pruned = {request: pruned for request, pruned in self._pruned.items() if request in self.requests}

    def _prune(self, req_id: str, nodes: list[int], parents: list[int]) -> None:
        request = self.requests.get(req_id)
        if request is None or request.is_finished() or request.is_prefill_chunk or not request.use_structured_output:
            return
        tree = DraftTree.build([0, *nodes], [-1, *parents])
        rows = allowed_rows(self.structured_output_manager, request, tree)
        self._pruned[req_id] = pruned = _Pruned(rows, tree.subset(rows))
        request.spec_token_ids = pruned.tree.nodes
        self._parents[req_id] = pruned.tree.parents[1:].tolist()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Add `kept_rows`, the rows left of each pruned tree of this step, `parents` of all trees' nodes, and `seen`."""
        self._give_up_drafts()
        output = super().schedule(throttle_prefills)
        drafted = output.scheduled_spec_decode_tokens
        output.kept_rows = {request: pruned.rows for request, pruned in self._pruned.items() if request in drafted}  # type: ignore[attr-defined]
        output.parents = {  # type: ignore[attr-defined]
            request: parents[: len(drafted[request])] for request, parents in self._parents.items() if request in drafted
        }
        output.seen, self._seen = self._seen, []  # type: ignore[attr-defined]
        return output

    def _give_up_drafts(self) -> None:
        """Drop drafts whose blocks the pool lacks: vLLM would preempt a request to make room for another's guesses."""
        drafted = [request for request in self.running if request.spec_token_ids]
        if not drafted:
            return
        spare = self.kv_cache_manager.block_pool.get_num_free_blocks() - sum(
            self._missing_blocks(request, request.num_tokens) for request in self.running
        )
        for request in drafted:
            extra = self._missing_blocks(request, request.num_tokens_with_spec) - self._missing_blocks(
                request, request.num_tokens
            )
            if extra > max(0, spare):
                request.spec_token_ids = []
            else:
                spare -= extra

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        """Count the K/V blocks a request lacks to hold its first `tokens` tokens, as far as one step can fill them."""
        tokens = min(tokens, request.num_computed_tokens + self.max_num_scheduled_tokens)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        return sum(max(0, -(-tokens // m.block_size) - len(m.req_to_blocks.get(request.request_id, ()))) for m in managers)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of every row of the constrained requests in this step."""
        if not scheduler_output.has_structured_output_requests:
            return None
        found = [self.requests[r] for r in scheduler_output.num_scheduled_tokens if r in self.requests]
        constrained = [request for request in found if request.use_structured_output and not request.is_prefill_chunk]
        if not constrained:
            return None
        trees = {request.request_id: self._scheduled(request, scheduler_output) for request in constrained}
        mask = masks(self.structured_output_manager, constrained, trees)
        return GrammarOutput(list(trees), mask, [tree.size for tree in trees.values()])

    def _scheduled(self, request: Request, output: SchedulerOutput) -> DraftTree:
        drafts = output.scheduled_spec_decode_tokens.get(request.request_id, [])
        if not drafts or drafts[0] == PLACEHOLDER:
            return DraftTree.chain(0, drafts)
        return self._pruned[request.request_id].tree.prefix(len(drafts))

    # Numbers -----------------------------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Take what the runner measured; placeholders are no nodes that anybody drafted."""
        self._measures, self._discarded = getattr(model_runner_output, "measures", None), 0
        if self._measures is not None:
            self._seen = self._measures.seen
        drafts = scheduler_output.scheduled_spec_decode_tokens
        padded = {request: len(nodes) for request, nodes in drafts.items() if nodes[0] == PLACEHOLDER}
        if padded:
            scheduler_output.num_invalid_spec_tokens = padded
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: TreeStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> TreeStats | None:
        """Count a verified tree."""
        if not self.log_stats:
            return None
        stats = spec_decoding_stats or TreeStats.new(self.num_spec_tokens)
        padding = (num_invalid_spec_tokens or {}).get(request_id, 0)
        depth = self._measures.depths[request_id] if self._measures is not None and not padding else 0
        stats.observe_tree(num_draft_tokens - padding, num_accepted_tokens, depth)
        return stats

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        emitted = len(new_token_ids)  # vLLM shortens the list itself
        kept, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        self._discarded += emitted - len(kept)
        return kept, stopped

    def make_stats(self, spec_decoding_stats: TreeStats | None = None, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Add what was measured in this step, trees verified or not."""
        if self.log_stats and self._measures is not None:
            spec_decoding_stats = spec_decoding_stats or TreeStats.new(self.num_spec_tokens)
            spec_decoding_stats.observe_step(self._measures, self._discarded)
        self._measures = None  # vLLM asks for stats between steps, too
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

"""Thinking budgets of single requests, whatever the batch does to their rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


class ThinkingBudgets(ThinkingBudgetStateHolder):
    """Keep vLLM's state machine and mend its bookkeeping.

    In vLLM 0.32 a request without a budget that is moved to the row of a finished one inherits that one's budget, and one that
    comes back from a preemption shows all it has written at once to a machine that must see token after token.
    """

    def sync_batch(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: requests removed, added, then moved one by one."""
        if batch_update is None:
            return
        super().sync_batch(dataclasses.replace(batch_update, moved=()))
        for index, _, _, written in batch_update.added:
            if index in self._state:
                self._replay(self._state[index], written)
        for source, target, direction in batch_update.moved:
            if direction == MoveDirectionality.UNIDIRECTIONAL and source not in self._state:
                self._state.pop(target, None)
            move = dataclasses.replace(batch_update, removed=(), added=(), moved=((source, target, direction),))
            super().sync_batch(move)

    def _replay(self, state: dict[str, Any], written: list[int]) -> None:
        """Bring the fresh state of a row to where it was before the last of the tokens `written` so far."""
        for count in range(len(written)):
            state |= {"output_tok_ids": written[:count], "in_spec_mode": False, "force_index": []}
            self._update_think_state(state)
        state["output_tok_ids"] = written


def count_thinking(batch: Any, config: VllmConfig) -> None:
    """Let a fresh batch count thinking tokens as without drafts: the walk asks for one token at a time."""
    if config.reasoning_config is not None:
        batch.thinking_budget_state_holder = ThinkingBudgets(
            config.reasoning_config, batch.max_num_reqs, 0, batch.device, False
        )

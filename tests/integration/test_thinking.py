"""Thinking budgets as the batch changes around them: the state of a row is that of its request, whatever became of the row."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate

from vllm_eagle.integration.thinking import ThinkingBudgets

START, END, VOCABULARY = 2, 3, 6


class Row:
    """One request in a batch of its own, asked for a token at a time as the walk does."""

    def __init__(self, prompt: list[int], budget: int, written: list[int], ends: list[int]) -> None:
        config: Any = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=ends)
        self.budgets = ThinkingBudgets(config, 4, 0, torch.device("cpu"), False)
        added = (0, SamplingParams(thinking_token_budget=budget), prompt, written)
        self.budgets.sync_batch(BatchUpdate(batch_size=1, removed=(), added=[added], moved=()))

    def forced(self, written: list[int]) -> list[float]:
        self.budgets.update_state([written], None)
        return self.budgets.apply_to_logits(torch.zeros(1, VOCABULARY), False, None)[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ends", [[END], [END, 4]], ids=["one token", "two tokens"])
@pytest.mark.parametrize("seed", range(60))
def test_a_preemption_does_not_change_the_count(seed: int, ends: list[int]) -> None:
    """Catches a request that comes back from a preemption with its budget spent, whole again, or its end forced twice."""
    draw = random.Random(seed)
    prompt = draw.choices(range(VOCABULARY), k=4) + draw.choice([[], [START]])
    budget, written = draw.randrange(6), list[int]()
    usual = Row(prompt, budget, written, ends)
    for _ in range(40):
        want = usual.forced(written)
        again = Row(prompt, budget, list(written), ends)
        for _ in range(draw.randint(1, 3)):  # in chunks: the sampler runs for each
            got = again.forced(written)
        assert got == want, f"after {written}"
        token = max(range(VOCABULARY), key=lambda t: (want[t], draw.random()))
        written = [*written, token]

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from vllm_eagle.bench.child import Job, Settings
from vllm_eagle.bench.hugging import start

PROMPTS = [[7, 8, 9, 7, 8, 9, 7, 8], [30, 40]]


def test_its_texts_and_times(target: str) -> None:
    """Catches a default of the model's generation settings that samples otherwise, and a prompt counted as its answer."""
    answer = start(Settings("hf", target, None, "float32", False, 64, 1, 0))
    greedy = answer(Job(PROMPTS, 10, 0.0, 1))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for prompt, ids in zip(PROMPTS, greedy.ids, strict=True):
        text = list(prompt)
        for wanted in ids:
            assert int(model(torch.tensor([text])).logits[0, -1].argmax()) == wanted
            text.append(wanted)
    assert len(greedy.first) == 2 and min(greedy.first) > 0
    assert (greedy.drafts, greedy.accepted) == (0, 0)
    hot = answer(Job(PROMPTS[:1], 10, 10.0, 1)).ids[0]
    ranks = model(torch.tensor([PROMPTS[0] + hot])).logits[0, len(PROMPTS[0]) - 1 : -1].argsort(descending=True).argsort()
    assert max(int(rank[token]) for rank, token in zip(ranks, hot, strict=True)) > 50  # no top-k, which is 50 by default
    sampled = [answer(Job(PROMPTS, 10, 1.0, 1)).ids for _ in range(2)]
    assert sampled[0] == sampled[1] != greedy.ids  # a seed for every request


def test_lookup_accepts_and_changes_nothing(folders: tuple[str, str]) -> None:
    """Catches a lookup that does not look up, and steps counted as tokens."""
    target = folders[0]
    repeats = [[7] * 30, *PROMPTS]
    plain = start(Settings("hf", target, None, "float32", False, 64, 1, 0))(Job(repeats, 24, 0.0, 1))
    found = start(Settings("hf-lookup:3", target, None, "float32", False, 64, 1, 0))(Job(repeats, 24, 0.0, 1))
    assert found.ids == plain.ids
    tokens = sum(map(len, found.ids))
    assert found.drafts + found.accepted == tokens and 0 < found.accepted <= 3 * found.drafts

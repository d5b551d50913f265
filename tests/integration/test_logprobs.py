"""Logprobs in all four modes of the engine equal plain decoding's (scenario 59)."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from tests.integration.harness import LETTERS, drafting, lettered_engines, runner_of
from tests.integration.random_requests import differences
from vllm_eagle.testing import Half

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
COMMON: dict[str, Any] = {"max_tokens": 25, "ignore_eos": True, "prompt_logprobs": 1}
MIXED = [
    SamplingParams(temperature=0, logprobs=4, presence_penalty=1.0, **COMMON),
    SamplingParams(temperature=0.8, seed=1, logprobs=2, top_k=30, **COMMON),
    SamplingParams(temperature=1.2, seed=2, logprobs=0, min_p=0.1, logit_bias={40: 3.0}, **COMMON),
    SamplingParams(temperature=0, **COMMON),
]
CHOSEN = [SamplingParams(temperature=0.5 * i, seed=i, logprob_token_ids=list(range(40, 44 + i)), **COMMON) for i in range(4)]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(tmp_path: Any, mode: str) -> None:
    """Catches values taken before or after the processors where the mode says otherwise, or from another row."""
    plain, tree = lettered_engines(tmp_path, logprobs_mode=mode)
    asked = [[LETTERS[(5 * i + j * j) % 95] for j in range(length)] for i, length in enumerate([5, 33, 64, 17])]
    for params in (MIXED, CHOSEN):
        want = plain.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
        texts = [prompt + list(out.outputs[0].token_ids) for prompt, out in zip(asked, want, strict=True)]
        growth = runner_of(tree).drafter.growth
        half = Half(None, growth, texts=texts, depth=4, width=3, sibling=1, right_depth=[4, 0, 2, 3], vocab=260)
        with drafting(tree, half):
            got = tree.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
        for one, two in zip(want, got, strict=True):
            assert not differences(one, two)

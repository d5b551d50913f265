"""Trees with the target compiled by Inductor: attention stays opaque, so metadata set from Python still reaches it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams

from tests.integration.harness import counters, engine, generate, greedy, prompts, watching
from vllm_eagle import speculate
from vllm_eagle.testing import tiny_head, tiny_target

pytestmark = pytest.mark.slow


def test_compiled(tmp_path: Path) -> None:
    """Catches key and value buffers that compiled code reuses before the accepted rows are committed (scenario 10)."""
    target = tiny_target(tmp_path / "target", damping=0.002)
    head = tiny_head(tmp_path / "head", copies=True)
    asked = prompts([5, 33, 64, 17, 120])
    base = engine(target)
    llm = engine(target, enforce_eager=False, max_num_batched_tokens=128, **speculate(head, tree_size=12))
    assert generate(llm, asked, greedy(40)) == generate(base, asked, greedy(40))
    for batch in (1, 2, 3, 8, 9, 17):
        some = prompts([9 + 5 * i for i in range(batch)])
        assert generate(llm, some, greedy(12)) == generate(base, some, greedy(12))
    assert counters(llm)["accepted_tokens"] > 50
    seeded = [SamplingParams(temperature=0.9, seed=i, max_tokens=30, ignore_eos=True) for i in range(5)]
    assert generate(llm, asked, seeded) == generate(base, asked, seeded)


def test_an_eagle3_head_reads_the_same_states(tmp_path: Path) -> None:
    """Catches states of inner layers that compilation drops, reorders, or reuses the memory of (scenario 10)."""
    target = tiny_target(tmp_path / "target", damping=0.002, layers=4)
    head = tiny_head(tmp_path / "head", draft_vocab=200)
    asked, seen = prompts([5, 33, 64, 17]), []
    texts = generate(engine(target), asked, greedy(16))
    for eager in (True, False):
        llm, states = engine(target, enforce_eager=eager, **speculate(head, tree_size=8)), list[Tensor]()
        with watching(llm, lambda known, trees, states=states: states.append(known.features.clone())):  # type: ignore[misc]
            assert generate(llm, asked, greedy(16)) == texts
        seen.append(states)
    assert len(seen[0]) == len(seen[1]) > 10
    for ours, theirs in zip(*seen, strict=True):
        assert ours.shape[1] == 3 * 64
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

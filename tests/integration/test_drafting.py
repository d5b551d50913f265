"""What the head drafts inside vLLM is what the paper's loop drafts, and a chain is vLLM's own chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.harness import engine, generate, greedy, prompts, runner_of
from vllm_eagle import speculate
from vllm_eagle.heads import load_head
from vllm_eagle.testing import CheckedDrafter, tiny_head, tiny_target

LENGTHS = [5, 33, 64, 17]


DYNAMIC = {"tree_size": 12, "tree_depth": 6, "tree_top_k": 3}
STATIC = {"tree": str(Path(__file__).parents[2] / "configs" / "tree" / "eagle1_25.json")}


@pytest.mark.parametrize(("layers", "options"), [(1, DYNAMIC), (2, DYNAMIC), (1, STATIC), (3, DYNAMIC)])
def test_draft_logits_equal_the_reference_loop(target: str, tmp_path: Any, layers: int, options: dict[str, Any]) -> None:
    """Catches a shifted token, feature, position or ancestor in the head's paged and tree attention, at every depth."""
    # the last case also has other heads than the target: vLLM then keeps K/V pages of two sizes
    folder = tiny_head(tmp_path / "head", layers=layers, bias=layers == 1, heads=(8, 8, 64) if layers == 3 else (4, 2, 32))
    llm = engine(target, max_num_batched_tokens=64, **speculate(folder, **options))
    runner = runner_of(llm)
    checked = CheckedDrafter(
        runner.drafter.drafter, load_head(folder), runner.model.embed_input_ids, runner.model.compute_logits
    )
    runner.drafter.drafter = checked
    with torch.inference_mode():
        generate(llm, prompts(LENGTHS), greedy(12))
    assert set(checked.checked) == set(range(checked.growth.depth))
    assert max(checked.worst.values()) < 1e-4, checked.worst


def steps(llm: Any, texts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return how many tokens each engine step added, request by request."""
    from vllm.sampling_params import RequestOutputKind

    for r, text in enumerate(texts):
        llm.llm_engine.add_request(str(r), {"prompt_token_ids": text}, greedy(tokens, output_kind=RequestOutputKind.DELTA))
    added: list[list[int]] = [[] for _ in texts]
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            added[int(out.request_id)].append(len(out.outputs[0].token_ids))
    return added


def test_a_chain_accepts_what_vllms_own_chain_eagle_accepts(tmp_path: Any) -> None:
    """Catches a difference in features, shift or positions that only shows as lost acceptance (scenario 4)."""
    target = tiny_target(tmp_path / "target", damping=0.002)
    folder = tiny_head(tmp_path / "head", bias=False, copies=True)
    mine = engine(target, **speculate(folder, tree_size=4, tree_depth=4, tree_top_k=1))
    asked = prompts(LENGTHS)
    got = steps(mine, asked, 40)
    theirs = engine(target, speculative_config={"method": "eagle", "model": folder, "num_speculative_tokens": 4})
    want = steps(theirs, asked, 40)
    assert got == want
    assert len({count for request in want for count in request}) > 2  # otherwise nothing was compared

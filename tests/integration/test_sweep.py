"""Every depth, width, sibling, batch size and block offset; the quick tests pick from these."""

from __future__ import annotations

import pytest
from vllm import LLM

from tests.integration.harness import counters, engine, generate, greedy, prompts, runner_of, since
from vllm_eagle import speculate
from vllm_eagle.testing import Half, Hostile, Oracle

pytestmark = pytest.mark.slow

TOKENS = 24
LENGTHS = [40 + 7 * i for i in range(9)]
OFFSETS = [64 + offset for offset in range(32)]


@pytest.fixture(scope="module")
def base(target: str) -> LLM:
    return engine(target)


@pytest.fixture(scope="module")
def tree(base: LLM, target: str, head: str) -> LLM:
    return engine(target, **speculate(head, tree_size=63, tree_depth=5, tree_top_k=8))


def outputs_of(base: LLM, lengths: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    asked = prompts(lengths)
    return asked, generate(base, asked, greedy(TOKENS + 10))


def check(tree: LLM, drafter: Oracle, asked: list[list[int]], outputs: list[list[int]], accepted: int) -> None:
    runner_of(tree).drafter.drafter = drafter
    before = counters(tree)
    assert generate(tree, asked, greedy(TOKENS)) == [out[:TOKENS] for out in outputs]
    seen = since(before, counters(tree))
    steps = len(asked) * -(-(TOKENS - 1) // (accepted + 1))
    assert seen["drafts"] == steps
    assert seen["accepted_tokens_per_pos"][:8] == [steps * (level < accepted) for level in range(8)]


@pytest.mark.parametrize("depth", range(1, 8))
@pytest.mark.parametrize("width", range(1, 9))
def test_shapes(base: LLM, tree: LLM, depth: int, width: int) -> None:
    """Catches a shape, a sibling or a batch size at which ids or accepted counts are wrong."""
    asked, outputs = outputs_of(base, LENGTHS)
    texts = [prompt + out for prompt, out in zip(asked, outputs, strict=True)]
    growth = runner_of(tree).drafter.growth
    for sibling in range(width):
        batch = 1 + (depth * 8 + width + sibling) % 9
        shape = {"texts": texts, "depth": depth, "width": width}
        check(tree, Oracle(None, growth, sibling=sibling, **shape), asked[:batch], outputs[:batch], depth)
        right = sibling % (depth + 1)
        check(tree, Half(None, growth, sibling=sibling, right_depth=right, **shape), asked[-batch:], outputs[-batch:], right)
    hostile = Hostile(None, growth, tokens=[1, 0, 255][: width - 1], **shape)
    runner_of(tree).drafter.drafter = hostile
    assert generate(tree, asked, greedy(TOKENS)) == [out[:TOKENS] for out in outputs]


def test_offsets(base: LLM, tree: LLM) -> None:
    """Catches slots computed wrongly where accepted tokens cross into the next block of 32."""
    asked, outputs = outputs_of(base, OFFSETS)
    texts = [prompt + out for prompt, out in zip(asked, outputs, strict=True)]
    growth = runner_of(tree).drafter.growth
    for sibling in range(3):
        for depth in (1, 4, 7):
            oracle = Oracle(None, growth, texts=texts, depth=depth, width=3, sibling=sibling)
            check(tree, oracle, asked, outputs, depth)

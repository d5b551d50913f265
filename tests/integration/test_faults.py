"""What fails must fail alone: a drafter that raises, a pool with no block to spare, an engine process that is killed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.harness import counters, drafting, engine, generate, greedy, lettered_options, runner_of, since
from vllm_eagle import speculate
from vllm_eagle.testing import Half, tiny_head, tiny_target

TOKENS = 40
LETTERS = list(range(36, 131))
ASKED = [[LETTERS[(3 * i + 7 * j + j * j) % 95] for j in range(length)] for i, length in enumerate([5, 33, 64, 17, 90, 8])]
PARAMS = [
    greedy(TOKENS),
    SamplingParams(temperature=1, seed=3, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(regex="[ab]{9,30}[0-9]{2}")),
    greedy(TOKENS, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=4, max_tokens=TOKENS, ignore_eos=True, logprobs=2),
    greedy(TOKENS),
]


class Fault(Exception):
    """What our failing parts raise."""


class Failing:
    """Call something, and raise now and then: before it, or after all its work."""

    def __init__(self, usual: Any, share: float, after: bool) -> None:
        self.usual, self.share, self.after = usual, share, after
        self.random, self.raised, self.calls = random.Random(5), 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        fails = self.random.random() < self.share
        if not fails or self.after:
            found = self.usual(*args, **kwargs)
        if fails:
            self.raised += 1
            raise Fault("this fails now and then")
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("letters"), vocab=300, letters=True)


@pytest.fixture(scope="module")
def plain(target: str) -> LLM:
    return engine(target, **lettered_options())


@pytest.fixture(scope="module")
def want(plain: LLM) -> list[list[int]]:
    return generate(plain, ASKED, PARAMS)


@pytest.fixture(scope="module")
def trees(plain: LLM, target: str, tmp_path_factory: pytest.TempPathFactory) -> LLM:  # counters are the last engine's
    head = tiny_head(tmp_path_factory.mktemp("head"), vocab=300)
    options = speculate(head, tree_size=34, tree_depth=5, tree_top_k=4)
    return engine(target, **lettered_options(), **options, enable_prefix_caching=True, max_num_batched_tokens=64)


@contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collect what our own loggers say."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    ours = logging.getLogger("vllm_eagle")
    ours.handlers = [*ours.handlers, handler]
    try:
        yield records
    finally:
        ours.handlers = [kept for kept in ours.handlers if kept is not handler]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["head", "embedding", "candidates"])
def test_a_pass_of_the_head_that_raises(trees: LLM, want: list[list[int]], monkeypatch: Any, where: str, after: bool) -> None:
    """Catches an exception inside one of the head's passes, some of its keys and values written, that ends the engine,
    changes a text (sampled, constrained, its prompt in chunks or from the prefix cache) or leaves a tree of a step before."""
    proposer = runner_of(trees).drafter
    texts = [prompt + ids for prompt, ids in zip(ASKED, want, strict=True)]
    shape: dict[str, Any] = {"texts": texts, "depth": 4, "width": 3, "sibling": 1, "right_depth": [4, 2, 0, 3], "vocab": 260}
    half = Half(proposer.drafter, proposer.growth, **shape)
    owner, name = {
        "head": (proposer.drafter.head, "forward"),
        "embedding": (proposer.drafter, "embed"),
        "candidates": (proposer.drafter, "candidates"),
    }[where]
    failing = Failing(getattr(owner, name), 0.1, after)
    before = counters(trees)
    with drafting(trees, half), logged() as records:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            assert generate(trees, ASKED, PARAMS) == want
        told = [record.getMessage() for record in records if record.exc_info and record.exc_info[0] is Fault]
        seen = since(before, counters(trees))
        assert failing.raised > 5 and 0 < len(told) <= len(ASKED)
        assert seen["accepted_tokens"] > 20  # the other steps draft
        assert generate(trees, ASKED, PARAMS) == want
    assert not runner_of(trees)._trees.keys() - runner_of(trees).requests.keys()


SIZE, BLOCK, BLOCKS = 40, 32, 4


@pytest.fixture(scope="module")
def cramped(target: str, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Trees of 40 nodes in a pool of four blocks, and the null block."""
    head = tiny_head(tmp_path_factory.mktemp("head"), vocab=300)
    options = speculate(head, tree_size=SIZE, tree_depth=5, tree_top_k=8)
    return engine(target, **options, num_gpu_blocks_override=BLOCKS + 1, block_size=BLOCK, max_model_len=BLOCKS * BLOCK)


@pytest.mark.parametrize("prompt", [1, 33, 96, 120])
def test_a_request_that_just_fits(plain: LLM, cramped: LLM, prompt: int) -> None:
    """Catches a request that waits for ever because its tree does not fit the pool; without a tree it fits (scenarios 31,
    75)."""
    asked, tokens = [LETTERS[(5 * i + prompt) % 95] for i in range(prompt)], BLOCKS * BLOCK - prompt
    text = generate(plain, [asked], greedy(tokens))[0]
    proposer = runner_of(cramped).drafter
    shape: dict[str, Any] = {"depth": 5, "width": 7, "sibling": 3, "right_depth": [5, 0, 2], "vocab": 260}
    with drafting(cramped, Half(proposer.drafter, proposer.growth, texts=[asked + text], **shape)):
        assert generate(cramped, [asked], greedy(tokens)) == [text]
        assert generate(cramped, [asked] * 3, greedy(tokens)) == [text] * 3  # one after another

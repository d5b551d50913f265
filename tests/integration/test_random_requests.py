"""Whatever a request asks for, what it gets equals plain decoding, whatever its neighbours ask for.

Five batches of twelve in the suite; `make test-full` draws five hundred requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.integration.harness import LETTERS, THINK, counters, drafting, engine, lettered_engines, runner_of, since
from tests.integration.random_requests import Damp, RequestMaker, Shift, describe, differences, run
from vllm_eagle import speculate
from vllm_eagle.demo.model import demo_model
from vllm_eagle.testing import Half, Hostile, Oracle


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    return lettered_engines(tmp_path_factory.mktemp("letters"))


def check(engines: tuple[LLM, LLM], seed: int) -> None:
    plain, tree = engines
    tokenizer = plain.get_tokenizer()
    words = [text for token in LETTERS if (text := tokenizer.decode([token])).strip()]
    words += [words[i] + words[(7 * i) % len(words)] for i in range(len(words))]
    make = RequestMaker(seed, LETTERS, words, THINK)
    requests = [make() for _ in range(12)]
    # alone: in company, vLLM 0.32 hands a finished request's thinking budget to whoever moves into its row
    want = [run(plain, [request])[0] for request in requests]
    texts = [request.prompt + list(o.token_ids) for request, out in zip(requests, want, strict=True) for o in out.outputs]
    runner = runner_of(tree)
    head, growth = runner.drafter.drafter, runner.drafter.growth
    options: dict[str, Any] = {"texts": texts, "vocab": 260}
    drafters = {
        "oracle": Oracle(head, growth, depth=4, width=3, sibling=seed % 3, **options),
        "half": Half(head, growth, depth=4, width=3, sibling=1, right_depth=[4, 1, 0, 3], **options),
        "hostile": Hostile(head, growth, depth=5, width=6, tokens=[1, 3, 62], **options),
    }
    before = counters(tree)
    for name, drafter in drafters.items():
        with drafting(tree, drafter):
            got = run(tree, requests)
        for request, one, two in zip(requests, want, got, strict=True):
            found = differences(one, two)
            assert not found, f"seed {seed}, {name}: {found}; alone: {describe(request)}"
    assert since(before, counters(tree))["accepted_tokens"] > 100
    assert not runner.requests or set(runner._trees) <= set(runner.requests)


@pytest.mark.parametrize("seed", range(5))
def test_equal_in_random_company(engines: tuple[LLM, LLM], seed: int) -> None:
    """Catches any parameter read without the accepted ancestors, or shared by a batch (scenario 9)."""
    check(engines, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 47))
def test_equal_in_random_company_at_length(engines: tuple[LLM, LLM], seed: int) -> None:
    """The same five hundred requests long."""
    check(engines, seed)


QUESTIONS = [
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give me three tips for learning to cook, as a numbered list.",
    "Explain photosynthesis to a ten-year-old.",
    "Write a Python function that reverses a list.",
    "Describe a busy market in the early morning.",
]


@pytest.fixture(scope="module")
def real(repository: Path) -> tuple[LLM, LLM]:
    model, head = str(demo_model()), str(repository / "examples" / "heads" / "smollm2-135m-eagle1")
    options: dict[str, Any] = {"max_logprobs": 10, "logits_processors": [Shift, Damp], "block_size": 128}
    options["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    return engine(model, **options), engine(model, **options, **speculate(head, tree_size=12))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
def test_a_real_head_on_a_real_model(real: tuple[LLM, LLM], seed: int) -> None:
    """Catches what only a real vocabulary, grammars over it, or a head that is half right brings out (scenario 7)."""
    plain, tree = real
    tokenizer = plain.get_tokenizer()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        for text in QUESTIONS
    ]
    words = [" the", "and", ".", ",", "?", " of a", "ing", " is", " to", "light", "for", " you", "def", "**", " in the"]
    make = RequestMaker(seed, list(range(20, 20000)), words, None, texts)
    requests = [make() for _ in range(12)]
    want = [run(plain, [request])[0] for request in requests]
    before = counters(tree)
    for request, one, two in zip(requests, want, run(tree, requests), strict=True):
        found = differences(one, two)
        assert not found, f"seed {seed}: {found}; alone: {describe(request)}"
    assert since(before, counters(tree))["accepted_tokens"] > 20

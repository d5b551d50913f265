"""Whatever a request asks for, what it gets equals plain decoding, whatever its neighbours ask for.

Five batches of twelve in the suite; `make test-full` draws five hundred requests.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm import LLM

from tests.integration.harness import LETTERS, THINK, counters, drafting, lettered_engines, runner_of, since
from tests.integration.random_requests import RequestMaker, describe, differences, run
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
    """Catches any parameter read without the accepted ancestors, or shared by a batch."""
    check(engines, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 47))
def test_equal_in_random_company_at_length(engines: tuple[LLM, LLM], seed: int) -> None:
    """The same five hundred requests long."""
    check(engines, seed)

"""Pages about requests that ask for one, out of a real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.integration.harness import engine, generate, greedy, prompts
from vllm_eagle import speculate

ASK = {"speculative_trace": True}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def tree(folders: tuple[str, str], pages: Path) -> LLM:
    target, head = folders
    return engine(target, **speculate(head, tree_size=12, tree_depth=4, trace=str(pages)))


def read(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: int(path.stem.split("-")[0])):
        (data,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', path.read_text(), re.S)
        found.append(json.loads(data))
        path.unlink()
    return found


def check(step: dict[str, Any]) -> None:
    """The accepted rows are a path from the root, and what was written are their tokens and one more."""
    at, tokens = 0, []
    for row in step["accepted"]:
        assert step["parents"][row] == at
        tokens.append(step["tokens"][row])
        at = row
    assert step["emitted"][: len(tokens)] == tokens
    assert step["rows"] >= len(step["tokens"]) == len(step["guesses"])
    assert step["verify_ms"] > 0


def test_pages_of_those_who_ask(tree: LLM, pages: Path) -> None:
    """Catches another request's steps on a page, lost or invented tokens, and a page nobody asked for."""
    asked = prompts([5, 9, 14])
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=17, ignore_eos=True, extra_args=ASK)
    given = [greedy(24, extra_args=ASK), greedy(20), sampled]
    outputs = tree.generate([{"prompt_token_ids": prompt} for prompt in asked], given, use_tqdm=False)
    tree.llm_engine.step()  # the worker hears of an end with the next step
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    found = read(pages)
    assert [[token for step in page["steps"] for token in step["emitted"]] for page in found] == [answers[0], answers[2]]
    for page in found:
        for step in page["steps"]:
            check(step)
        assert page["steps"][0]["tokens"][0] in (asked[0][-1], asked[2][-1])
        assert [step["tokens"][0] for step in page["steps"][1:]] == [step["emitted"][-1] for step in page["steps"][:-1]]
        assert any(step["accepted"] for step in page["steps"])
        assert all(step["draft_ms"] > 0 for step in page["steps"] if len(step["tokens"]) > 1)
    assert max(step["requests"] for step in found[0]["steps"]) == 3


def test_a_page_ends_where_its_answer_does(tree: LLM, pages: Path) -> None:
    """Catches tokens behind a stop or the limit on the page: a step writes them, and nobody gets them."""
    (whole,) = generate(tree, [[5, 6, 7]], greedy(40))
    for limit in (7, 8, 9, 10):
        generate(tree, [[5, 6, 7]], greedy(limit, extra_args=ASK))
    generate(tree, [[5, 6, 7]], greedy(40, stop_token_ids=[whole[20]], extra_args=ASK))
    tree.llm_engine.step()
    written = [[token for step in page["steps"] for token in step["emitted"]] for page in read(pages)]
    assert written == [whole[:limit] for limit in (7, 8, 9, 10)] + [whole[: whole.index(whole[20]) + 1]]


def test_a_wish_that_is_none_is_refused(tree: LLM) -> None:
    """Catches a value that means yes by accident."""
    with pytest.raises(VLLMValidationError, match="speculative_trace='no': want true"):
        generate(tree, [[5]], greedy(3, extra_args={"speculative_trace": "no"}))


def test_a_folder_that_is_gone_costs_no_answer(tree: LLM, pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that ends the engine."""
    from tests.integration.harness import runner_of

    expected = generate(tree, [[5, 6, 7]], greedy(12))
    monkeypatch.setattr(runner_of(tree)._tracer, "_folder", pages / "gone")
    assert generate(tree, [[5, 6, 7]], greedy(12, extra_args=ASK)) == expected
    assert generate(tree, [[5, 6, 7]], greedy(12)) == expected
    assert not runner_of(tree)._tracer._traces
    assert not list(pages.iterdir())

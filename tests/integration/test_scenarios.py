"""Public bug reports about speculative decoding, each as a test that names its number in the list of scenarios."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.integration.harness import (
    END_OF_THINKING,
    LETTERS,
    THINK,
    counters,
    drafting,
    generate,
    greedy,
    lettered_engines,
    runner_of,
    since,
)
from tests.integration.random_requests import differences
from vllm_eagle.testing import Half, Hostile, Oracle

TOKENS = 30
ASKED = [[LETTERS[(3 * i + 7 * j + j * j) % 95] for j in range(length)] for i, length in enumerate([5, 33, 64, 17, 90, 8, 31])]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    return lettered_engines(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def written(engines: tuple[LLM, LLM]) -> list[list[int]]:
    """What plain decoding writes greedily, without ever stopping."""
    return generate(engines[0], ASKED, greedy(TOKENS + 10))


def oracle(tree: LLM, texts: list[list[int]], depth: int = 4, sibling: int = 1, **options: Any) -> Oracle:
    proposer = runner_of(tree).drafter
    return Oracle(proposer.drafter, proposer.growth, texts=texts, depth=depth, width=3, sibling=sibling, vocab=260, **options)


def outputs(llm: LLM, params: list[SamplingParams], asked: list[list[int]] = ASKED) -> list[Any]:
    return llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)


def check(
    engines: tuple[LLM, LLM], params: list[SamplingParams], asked: list[list[int]] = ASKED, accepted: bool = True
) -> list[Any]:
    """Compare everything a user sees, the drafter being right to a depth that changes; return plain decoding's outputs."""
    plain, tree = engines
    want = outputs(plain, params, asked)
    texts = [prompt + list(out.outputs[0].token_ids) for prompt, out in zip(asked, want, strict=True)]
    proposer = runner_of(tree).drafter
    shape: dict[str, Any] = {"texts": texts, "depth": 4, "width": 3, "vocab": 260}
    before = counters(tree)
    for drafter in (
        oracle(tree, texts),
        Half(proposer.drafter, proposer.growth, sibling=2, right_depth=[4, 2, 0, 3], **shape),
    ):
        with drafting(tree, drafter):
            for one, two in zip(want, outputs(tree, params, asked), strict=True):
                assert not differences(one, two)
    if accepted:
        assert since(before, counters(tree))["accepted_tokens"] > 0.5 * sum(len(out.outputs[0].token_ids) for out in want)
    return want


def test_6_a_plausible_token_is_not_the_best_one(engines: tuple[LLM, LLM], written: list[list[int]]) -> None:
    """Catches greedy acceptance of a branch that is not the argmax: the 2nd, 3rd and 4th best are offered at every level."""
    plain, tree = engines
    ranked = outputs(plain, [greedy(TOKENS, logprobs=4)] * len(ASKED))
    for others in (1, 2, 3):
        texts = []
        for prompt, out in zip(ASKED, ranked, strict=True):
            best = out.outputs[0].logprobs
            texts.append(prompt + [sorted(step, key=lambda t, s=step: s[t].rank)[others] for step in best])
        growth = runner_of(tree).drafter.growth
        before = counters(tree)
        with drafting(tree, Second(None, growth, texts=texts, depth=1, width=1, sibling=0, written=written)):
            assert generate(tree, ASKED, greedy(TOKENS)) == [out[:TOKENS] for out in written]
        seen = since(before, counters(tree))
        assert seen["accepted_tokens"] == 0
        assert seen["draft_tokens"] == seen["drafts"] > 100


class Second(Oracle):
    """Offer what stands in another text at the place that was reached."""

    def __init__(self, *args: Any, written: list[list[int]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.real = [prompt + out for prompt, out in zip(ASKED, written, strict=True)]

    def right(self, history: Any) -> list[int]:
        (which,) = [i for i, text in enumerate(self.real) if text[: len(history)] == history.tolist()]
        return list(self.texts[which][len(history) : len(history) + 1])


def test_12_one_candidate_is_greedy(engines: tuple[LLM, LLM], written: list[list[int]]) -> None:
    """Catches an acceptance test that uses other sampling settings than the draw."""
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        params = [SamplingParams(temperature=1, max_tokens=TOKENS, ignore_eos=True, **narrow)] * len(ASKED)
        tree = engines[1]
        with drafting(tree, oracle(tree, [p + out for p, out in zip(ASKED, written, strict=True)])):
            assert generate(tree, ASKED, params) == [out[:TOKENS] for out in written]


@pytest.mark.parametrize("index", range(7))
def test_42_the_first_end_in_token_order_wins(engines: tuple[LLM, LLM], written: list[list[int]], index: int) -> None:
    """Catches tokens behind EOS, a stop token or max_tokens inside an accepted run, and the wrong reason."""
    for most in (index, index + 1, index + 2, TOKENS):
        for ignore in (False, True):
            stops = [[out[index]] for out in written]
            common: dict[str, Any] = {"temperature": 0, "max_tokens": max(1, most), "ignore_eos": ignore}
            want = check(engines, [SamplingParams(**common, stop_token_ids=stop) for stop in stops], accepted=index > 1)
            assert {len(out.outputs[0].token_ids) for out in want} <= set(range(index + 2))


def test_42_a_token_the_model_writes_as_eos(engines: tuple[LLM, LLM], written: list[list[int]]) -> None:
    """Catches EOS honoured one step late, and `ignore_eos` forgotten in a tree."""
    bias = [{1: 100.0} if i % 2 else {} for i in range(len(ASKED))]
    for ignore in (False, True):
        params = [
            SamplingParams(temperature=0, max_tokens=9, min_tokens=i, ignore_eos=ignore, logit_bias=b or None)
            for i, b in enumerate(bias)
        ]
        want = check(engines, params)
        reasons = {out.outputs[0].finish_reason for out in want[1::2]}
        assert reasons == ({"length"} if ignore else {"stop"})


@pytest.mark.parametrize("kept", [False, True])
def test_44_stop_strings_across_tokens_and_steps(engines: tuple[LLM, LLM], kept: bool) -> None:
    """Catches ids and logprobs left behind a stop string that spans tokens, and text cut at another place."""
    plain, _ = engines
    free = outputs(plain, [greedy(TOKENS)] * len(ASKED))
    for at in (3, 8):
        params = []
        for out in free:
            text = out.outputs[0].text
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=TOKENS,
                    ignore_eos=True,
                    logprobs=2,
                    stop=[text[at : at + 3] or "zz"],
                    include_stop_str_in_output=kept,
                )
            )
        want = check(engines, params)
        assert "stop" in {out.outputs[0].finish_reason for out in want}


def test_45_min_tokens_counts_the_ancestors(engines: tuple[LLM, LLM]) -> None:
    """Catches EOS accepted from a node before min_tokens; EOS is what the model wants, and what every node offers."""
    plain, tree = engines
    for least in (5, 6, 7):
        params = [SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=least, logit_bias={1: 100.0})] * len(ASKED)
        want = [list(out.outputs[0].token_ids) for out in outputs(plain, params)]
        assert {len(ids) for ids in want} == {least + 1}
        texts = [prompt + ids for prompt, ids in zip(ASKED, want, strict=True)]
        growth = runner_of(tree).drafter.growth
        with drafting(tree, Hostile(None, growth, texts=texts, depth=4, width=5, tokens=[1], vocab=260)):
            assert generate(tree, ASKED, params) == want


def test_47_penalties_follow_the_path(engines: tuple[LLM, LLM]) -> None:
    """Catches penalties counted over siblings, lost in verification, or left behind by rejected drafts."""
    base: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    kinds = [{"presence_penalty": 1.5}, {"presence_penalty": -1.5}, {"frequency_penalty": 1.5}, {"frequency_penalty": -1.5}]
    kinds += [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.8}]
    texts = set()
    for kind in kinds:
        want = check(engines, [SamplingParams(**base, **kind)] * len(ASKED))
        texts.add(tuple(want[1].outputs[0].token_ids))
    assert len(texts) > 3  # penalties do something to this model
    check(engines, [SamplingParams(**base, **kind) for kind in [{}, *kinds]])


def test_48_min_p_and_logit_bias(engines: tuple[LLM, LLM], written: list[list[int]]) -> None:
    """Catches parameters that hold for some tokens of a reply only."""
    banned = [max(set(out), key=out.count) for out in written]
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logit_bias={token: -100.0}) for token in banned]
    for out, token in zip(check(engines, params), banned, strict=True):
        assert token not in out.outputs[0].token_ids
    check(engines, [SamplingParams(temperature=1.2, seed=i, min_p=0.2, max_tokens=TOKENS) for i in range(len(ASKED))])


def test_49_seeds(engines: tuple[LLM, LLM]) -> None:
    """Catches a seed ignored, or random draws shared with neighbours: alone or in company, twice the same."""
    _, tree = engines
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(20)]
    asked = [ASKED[0]] * 20
    together = generate(tree, asked, params)
    assert together == generate(tree, asked, params) == [generate(tree, [ASKED[0]], [one])[0] for one in params]
    assert len(set(map(tuple, together))) >= 18
    check(engines, params, asked)


def test_50_bad_words_allowed_tokens_custom_processors(engines: tuple[LLM, LLM], written: list[list[int]]) -> None:
    """Catches a two-token word that one run completes, tokens outside the allowed, and a processor that is skipped."""
    base: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    params = []
    for out in written:
        params.append(SamplingParams(**base))
        params[-1]._bad_words_token_ids = [out[2:4], out[9:12]]
    for out, plain in zip(check(engines, params), written, strict=True):
        ids = list(out.outputs[0].token_ids)
        assert all(ids[i : i + 2] != plain[2:4] for i in range(len(ids)))
    allowed = LETTERS[10:60]
    for out in check(engines, [SamplingParams(**base, allowed_token_ids=allowed)] * len(ASKED)):
        assert set(out.outputs[0].token_ids) <= set(allowed)
    for processor in ("shift", "damp"):  # one class for the batch, one function for each request
        changed = check(engines, [SamplingParams(**base, extra_args={processor: True})] * len(ASKED))
        assert any(list(out.outputs[0].token_ids) != ids[:TOKENS] for out, ids in zip(changed, written, strict=True))


@pytest.mark.parametrize("budget", [0, 1, 10, 11, 12])
def test_51_thinking_budget_to_the_token(engines: tuple[LLM, LLM], budget: int) -> None:
    """Catches a cap on reasoning that is only looked at once per step."""
    asked = [[*prompt, THINK] for prompt in ASKED]
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, thinking_token_budget=budget)] * len(asked)
    for out in check(engines, params, asked):
        assert END_OF_THINKING in out.outputs[0].token_ids[: budget + 1]


@pytest.mark.parametrize("budget", range(1, 7))
def test_57_reasoning_ends_inside_the_tree(engines: tuple[LLM, LLM], budget: int) -> None:
    """Catches tokens behind the end of reasoning that the grammar did not see, or saw twice, wherever in a tree that is."""
    asked = [[*prompt, THINK] for prompt in ASKED]
    choices = ["abba", "baab", "12"]
    common: dict[str, Any] = {"temperature": 0.8, "max_tokens": TOKENS, "thinking_token_budget": budget}
    params = [
        SamplingParams(**common, seed=i, structured_outputs=StructuredOutputsParams(choice=choices)) for i in range(len(asked))
    ]
    tokenizer = engines[0].get_tokenizer()
    answers = [list(out.outputs[0].token_ids) for out in check(engines, params, asked)]
    reasoned = [ids for ids in answers if END_OF_THINKING in ids]  # the others ended before
    assert len(reasoned) >= 4
    for ids in reasoned:
        assert tokenizer.decode(ids[ids.index(END_OF_THINKING) + 1 : -1]) in choices


def test_58_one_failing_request_fails_alone(engines: tuple[LLM, LLM]) -> None:
    """Catches masks that no longer match the batch after aborts and ends: half constrained, aborted at random."""
    _, tree = engines
    core, finished = tree.llm_engine, {}
    for i in range(12):
        regex = StructuredOutputsParams(regex="[ab]{3,9}[0-9]{2}") if i % 2 else None
        params = SamplingParams(temperature=0, max_tokens=TOKENS, structured_outputs=regex)
        core.add_request(f"{i}", {"prompt_token_ids": [*ASKED[i % 7], THINK, END_OF_THINKING]}, params)
    step = 0
    while core.has_unfinished_requests():
        finished.update({out.request_id: out for out in core.step() if out.finished})
        step += 1
        if step in (2, 3, 5, 8):
            core.abort_request([f"{step}", f"{step + 1}"])
    tokenizer = tree.get_tokenizer()
    checked = [out for name, out in finished.items() if int(name) % 2 and out.outputs[0].finish_reason == "stop"]
    assert len(checked) >= 2
    for out in checked:
        assert set(tokenizer.decode(out.outputs[0].token_ids[:-1])) <= set("ab0123456789")
    assert not runner_of(tree).requests or len(runner_of(tree).requests) < 12


def test_59_logprobs_of_every_token(engines: tuple[LLM, LLM]) -> None:
    """Catches values of other rows or placeholders, for first, accepted and bonus tokens, beside rows that do not ask."""
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=TOKENS, logprobs=[5, None, 0, 1][i % 4], ignore_eos=True)
        for i in range(len(ASKED))
    ]
    want = check(engines, params)
    assert all(len(out.outputs[0].logprobs) == TOKENS for i, out in enumerate(want) if i % 4 != 1)


def test_beam_search(engines: tuple[LLM, LLM]) -> None:
    """Catches logprobs of one-token requests that trees disturb: beams are made of many of them."""
    found = [
        llm.beam_search([TokensPrompt(prompt_token_ids=p) for p in ASKED[:3]], BeamSearchParams(beam_width=3, max_tokens=8))
        for llm in engines
    ]
    beams = [[sequence.tokens for sequence in out.sequences] for out in found[0]]
    assert beams == [[sequence.tokens for sequence in out.sequences] for out in found[1]]
    assert len(beams[0]) == 3

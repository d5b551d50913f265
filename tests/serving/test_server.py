"""What an OpenAI client sees of a server with trees is what it sees of the same server without them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from vllm import SamplingParams

from tests.integration.harness import counters, engine, since
from tests.serving.cases import CASES, CROWD, FREE, LONG, NODES, PRINTABLE, PROMPT, STOPS, TOKENS, Plain, ask, ask_all
from tests.serving.server import NAME, Server, unlike


@pytest.mark.parametrize("name", [*CASES, *STOPS])
def test_whole_and_streamed(plain: Plain, trees: Server, name: str) -> None:
    """Catches text, ids, logprobs, reasons or usage lost or doubled where a chunk holds several tokens."""
    body = plain.bodies[name]
    whole, streamed = ask(trees, body), ask(trees, body, stream=True)
    assert not unlike(plain.whole[name], whole)
    assert not unlike(plain.streamed[name], streamed)
    assert not unlike(whole, streamed)
    if body.get("return_token_ids", True) and body.get("max_tokens", TOKENS) > 2:
        assert max(streamed.runs) > 2  # a run was accepted


@pytest.mark.parametrize("name", STOPS)
def test_stops_cut_a_run(plain: Plain, name: str) -> None:
    """Catches cases that prove nothing: every stop comes before the end."""
    (choice,) = plain.whole[name].choices.values()
    assert choice["finish"] == "stop"
    assert 2 < len(choice["ids"]) < TOKENS


def test_best_of(plain: Plain, trees: Server) -> None:
    """Catches sums of logprobs by which a client would choose another of `n`."""
    best = []
    for answer in (plain.whole["three of each"], ask(trees, CASES["three of each"])):
        best.append(max(answer.choices, key=lambda index: sum(entry[1] for entry in answer.choices[index]["logprobs"])))
    assert best[0] == best[1]
    assert len({choice["text"] for choice in plain.whole["three of each"].choices.values()}) == 3


def test_usage_while_it_streams(trees: Server) -> None:
    """Catches running usage that counts chunks instead of tokens."""
    seen = total = 0
    usage = {"include_usage": True, "continuous_usage_stats": True}
    extra = FREE | {"return_token_ids": True}
    with trees.client.completions.create(
        model=NAME, prompt=PROMPT, stream=True, stream_options=usage, extra_body=extra
    ) as chunks:
        for chunk in chunks:
            total += sum(len(choice.token_ids) for choice in chunk.choices)
            assert chunk.usage.completion_tokens == total
            seen += 1
    assert total == TOKENS > 2 * seen


def test_a_crowd(plain: Plain, trees: Server) -> None:
    """Catches rows mixed up when more clients come at once than the engine takes."""
    with ThreadPoolExecutor(len(CROWD)) as pool:
        answers = list(pool.map(lambda i: ask(trees, CROWD[i], stream=i % 2 == 0), range(len(CROWD))))
    for alone, together in zip(plain.crowd, answers, strict=True):
        assert not unlike(alone, together)


def test_81_numbers_per_request(trees: Server) -> None:
    """Catches numbers of single requests that do not add up to those of the server, or to the tokens seen (scenario 81)."""
    before = trees.metrics()
    with ThreadPoolExecutor(len(CROWD)) as pool:
        answers = list(pool.map(lambda body: ask(trees, body, stream=True), CROWD))
    counted = trees.metrics() - before
    found = [answer.speculation for answer in answers]
    for one, all_of in (
        ("num_spec_steps", "drafts"),
        ("num_draft_tokens", "draft_tokens"),
        ("num_accepted_draft_tokens", "accepted_tokens"),
    ):
        assert sum(each[one] for each in found) == counted[f"spec_decode_num_{all_of}_total"] > 0
    for depth, (answer, own) in enumerate(zip(answers, found, strict=True)):
        assert sum(answer.runs) == TOKENS
        assert sum(own["per_step_accepted"]) == own["num_accepted_draft_tokens"]
        assert max(own["per_step_accepted"]) == depth % 7  # as deep as this request's drafts are right


def with_nodes(nodes: Any, **body: Any) -> dict[str, Any]:
    return CASES["greedy"] | {"vllm_xargs": {"speculative_tree_size": nodes}} | body


def test_nodes_for_one_request(plain: Plain, trees: Server) -> None:
    """Catches a request's wish that gets lost between HTTP and the runner, or holds for its neighbours."""
    before = trees.metrics()
    for stream in (False, True):
        assert not unlike(plain.whole["greedy"], ask(trees, with_nodes(0), stream))
    assert trees.metrics()["spec_decode_num_drafts_total"] == before["spec_decode_num_drafts_total"]
    answers = ask_all(trees, [with_nodes(0), with_nodes(5), with_nodes(1000), CASES["greedy"]])
    assert not any(unlike(plain.whole["greedy"], answer) for answer in answers)
    drafted = [max(answer.speculation.get("per_step_drafted") or [0]) for answer in answers]
    assert drafted == [0, 5, NODES, NODES]


@pytest.mark.parametrize("nodes", [-1, 2.5, "all", "3", [3]])
def test_a_bad_number_of_nodes(plain: Plain, trees: Server, nodes: Any) -> None:
    """Catches a bad value that ends the server, or an error unlike those of vLLM's own parameters."""
    for stream in (False, True):
        own = refusal(trees, CASES["greedy"] | {"allowed_token_ids": [10**6]}, stream)
        ours = refusal(trees, with_nodes(nodes), stream)
        assert type(ours) is type(own)
        assert (own.body["code"], own.body["param"]) == (400, "allowed_token_ids")
        assert (ours.body["code"], ours.body["param"]) == (400, "speculative_tree_size")
        assert f"speculative_tree_size={nodes!r}: want" in ours.body["message"]
        assert "\n" not in ours.body["message"]
    assert not unlike(plain.whole["greedy"], ask(trees, CASES["greedy"]))


def refusal(server: Server, body: dict[str, Any], stream: bool) -> Any:
    """Return the error of a request; a stream brings it as its first chunk if the engine finds it."""
    with pytest.raises(openai.APIError) as caught:
        ask(server, body, stream)
    return caught.value


def test_clients_that_leave(plain: Plain, trees: Server) -> None:
    """Catches blocks or rows kept, or given to a neighbour, when a client leaves at any step (scenario 86)."""
    with ThreadPoolExecutor(18) as pool:
        staying = [pool.submit(ask, trees, body, place % 3 > 0) for place, body in enumerate(LONG)]
        leaving = [pool.submit(leave, trees, place) for place in range(30)]
        hanging = [pool.submit(hang_up, trees, place) for place in range(4)]
        assert [each.result() for each in leaving] == [place % 7 for place in range(30)]
        assert all(each.result() for each in hanging)
        for alone, answer in zip(plain.long, staying, strict=True):
            assert not unlike(alone, answer.result())
    assert not unlike(plain.whole["greedy"], ask(trees, CASES["greedy"]))
    assert idle(trees)


def leave(server: Server, place: int) -> int:
    """Close a stream after some chunks and return how many were read."""
    extra = FREE | {"max_tokens": 700}
    stream = server.client.completions.create(model=NAME, prompt=f"{place % 5} leaving", stream=True, extra_body=extra)
    read = 0
    with stream as chunks:
        for _, _ in zip(range(place % 7), chunks, strict=False):
            read += 1
    return read


def hang_up(server: Server, place: int) -> bool:
    """Drop the connection while the answer is written; tell whether that was so."""
    impatient = server.client.with_options(timeout=0.1 * (place + 1))
    try:
        impatient.completions.create(model=NAME, prompt=f"{place} hanging up", extra_body=FREE | {"max_tokens": 900})
    except openai.APITimeoutError:
        return True
    return False


def idle(server: Server) -> bool:
    """Wait until nothing runs, nothing waits and no block is held."""
    for _ in range(100):
        counted = server.metrics()
        busy = [counted[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
        if not any(busy):
            return True
        time.sleep(0.1)
    raise AssertionError(f"still busy: {busy}")


@pytest.mark.parametrize("processes", ["0", "1"])
def test_in_one_process_or_several(
    plain: Plain, options: dict[str, Any], trees: Server, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    """Catches a plugin that is loaded in one kind of process only (scenario 78)."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    asked = [body for body in CROWD if "seed" not in body][:5]
    before = trees.metrics()
    served = [ask(trees, body) for body in asked]
    drafts = trees.metrics() - before
    llm = engine(plain.target, block_size=32, **options)
    try:
        start = counters(llm)
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, allowed_token_ids=PRINTABLE)
        outs = llm.generate([body["prompt"] for body in asked], params, use_tqdm=False)
        counted = since(start, counters(llm))
    finally:
        llm.llm_engine.engine_core.shutdown()
    ids = [list(out.outputs[0].token_ids) for out in outs]
    alone = [answer for answer, body in zip(plain.crowd, CROWD, strict=True) if "seed" not in body][:5]
    assert ids == [answer.choices[0]["ids"] for answer in served] == [answer.choices[0]["ids"] for answer in alone]
    assert counted["drafts"] == drafts["spec_decode_num_drafts_total"] > 0
    assert counted["accepted_tokens"] == drafts["spec_decode_num_accepted_tokens_total"] > 0

"""The examples, run as a user would: offline in several processes, and both ways to start a server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

REGEX = "(w5|w9|w30)(w7|w11){3,9}w3"
SPECIAL: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": REGEX}, "ignore_eos": False},
    {"logit_bias": {"5": -100.0, "77": 4.0}},
    {"min_p": 0.2, "temperature": 1.0, "seed": 3},
]
"""What vLLM refuses under speculation, or what needs the tree in the scheduler's process."""
PROMPTS = ["w5 w9 w200", "w77 " * 40, "w3", "w12 w13 w14 w15"]


@pytest.fixture(scope="module")
def plain(folders: tuple[str, str]) -> list[str]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from tests.integration.harness import engine, greedy

    llm = engine(folders[0], max_model_len=256)
    special = [
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=REGEX)),
        greedy(40, logit_bias={5: -100.0, 77: 4.0}),
        SamplingParams(temperature=1.0, seed=3, min_p=0.2, max_tokens=40, ignore_eos=True),
    ]
    params = [greedy(40)] * len(PROMPTS) + special
    outs = llm.generate(PROMPTS + PROMPTS[:1] * len(special), params, use_tqdm=False)
    return [out.outputs[0].text for out in outs]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "1"}
    return os.environ | {"PATH": path} | settings


def test_offline(folders: tuple[str, str], repository: Path) -> None:
    """Catches a step that works in one process and not in vLLM's default of several."""
    script = [sys.executable, str(repository / "examples" / "offline.py"), "--model", folders[0], "--head", folders[1]]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    ((accepted, nodes),) = re.findall(r"mean accepted length: ([\d.]+), trees of ([\d.]+) nodes", done.stdout)
    assert float(accepted) > 1.0
    assert 1.0 < float(nodes) <= 12.0


@pytest.fixture(scope="module", params=["serve.sh", "serve_long_form.sh"])
def server(request: Any, folders: tuple[str, str], repository: Path, tmp_path_factory: Any) -> Iterator[tuple[str, Path]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [str(repository / "examples" / request.param), *folders, "--max-model-len", "256", "--port", str(port)]
    command += ["--per-request-spec-decode-metrics", "summary"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--served-model-name", "tiny"], stdout=out, stderr=out, env=environment(), start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url + "/health", process, log)
        yield url, log
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def ask(url: str, **body: Any) -> Any:
    data = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 40} | body).encode()
    asked = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.load(answer)


def test_server(server: tuple[str, Path], plain: list[str]) -> None:
    """Catches flags that do not reach the workers, and counters that do not show trees."""
    url, _ = server
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(url, prompt=prompt), PROMPTS))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == plain[:4]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [40] * 4
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    counted = {
        name: float(value) for name, value in re.findall(r"^vllm:spec_decode_num_(\w+)_total\{[^}]*\} (\S+)$", text, re.M)
    }
    by_depth = [float(v) for v in re.findall(r'accepted_tokens_per_pos_total\{[^}]*position="\d+"\} (\S+)', text)]
    assert counted["draft_tokens"] > counted["drafts"] > 0  # several nodes each
    assert counted["accepted_tokens"] == sum(by_depth) > 0
    assert by_depth == sorted(by_depth, reverse=True)  # counted by depth
    # each request emits one token from its prompt, then one more than it accepts per step
    assert counted["accepted_tokens"] + counted["drafts"] >= 4 * 39 - 4
    seeded = [ask(url, prompt=PROMPTS[0], temperature=1.0, seed=7)["choices"][0]["text"] for _ in range(2)]
    assert seeded[0] == seeded[1] != plain[0]


def test_server_takes_any_parameter(server: tuple[str, Path], plain: list[str]) -> None:
    """Catches a refusal of vLLM's front end, and a grammar whose scheduler process does not get the trees."""
    url, log = server
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: ask(url, prompt=PROMPTS[0], **body)["choices"][0], SPECIAL))
    assert [answer["text"] for answer in answers] == plain[4:]
    assert re.fullmatch(REGEX, answers[0]["text"].replace(" ", "")) or answers[0]["finish_reason"] == "length"
    assert "ERROR" not in log.read_text()


TEN = [" ".join(f"w{(7 * i + 3 * j) % 250 + 2}" for j in range(2 + 5 * i)) for i in range(10)]
OURS = "vllm:spec_decode_tree_"


@pytest.fixture(scope="module")
def offline(folders: tuple[str, str]) -> tuple[list[list[int]], dict[str, float]]:
    """What ten requests return in process, and what was counted; checked against what passed between scheduler and runner."""
    from tests.integration.harness import counters, engine, greedy, traced
    from vllm_eagle import speculate

    llm = engine(folders[0], max_model_len=256, **speculate(folders[1], tree_size=12))
    with traced(llm) as trace:
        outs = llm.generate(TEN, greedy(40), use_tqdm=False)
    ids, counted = [list(out.outputs[0].token_ids) for out in outs], counters(llm)
    found = {m.name.removeprefix(OURS): m for m in llm.get_metrics() if m.name.startswith(OURS)}
    counted |= {"discarded": found["discarded_tokens"].value}
    counted |= {name: found[f"{name}_nodes"].sum for name in ("drafted", "verified")}
    alone = sum(len(step.emitted) for step in trace if not step.nodes)
    assert counted["drafts"] + counted["accepted_tokens"] + alone - counted["discarded"] == sum(map(len, ids)) == 400
    assert counted["drafted"] >= counted["verified"] == counted["draft_tokens"] > counted["accepted_tokens"] > 0
    del counted["accepted_tokens_per_pos"]
    return ids, counted


def scraped(url: str) -> dict[str, float]:
    """Return every sample of /metrics by name, summed over its labels."""
    found: dict[str, float] = {}
    for name, value in re.findall(
        r"^(vllm:\w+)(?:\{.*\})? (\S+)$", urllib.request.urlopen(url + "/metrics").read().decode(), re.M
    ):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_81_three_sources_agree(
    server: tuple[str, Path], offline: tuple[list[list[int]], dict[str, float]], repository: Path
) -> None:
    """Catches numbers that are missing or different in `get_metrics()`, in `/metrics` or in a reply (scenario 81)."""
    url, log = server
    ids, want = offline
    before = scraped(url)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(url, prompt=prompt, return_token_ids=True), TEN))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == ids
    seen = {name: value - before.get(name, 0.0) for name, value in scraped(url).items()}
    counted = {name: seen[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")}
    counted |= {name: seen[f"{OURS}{name}_nodes_sum"] for name in ("drafted", "verified")}
    assert counted | {"discarded": seen[f"{OURS}discarded_tokens_total"]} == want
    replies = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for name, key in (("drafts", "num_spec_steps"), ("draft_tokens", "num_draft_tokens")):
        assert sum(reply[key] for reply in replies) == want[name]
    assert sum(reply["num_accepted_draft_tokens"] for reply in replies) == want["accepted_tokens"]
    named = set(re.findall(r"vllm:\w+", (repository / "examples" / "grafana.json").read_text()))
    assert len(named) > 12 and named <= seen.keys()  # the dashboard shows what exists
    wait_for_line(
        log, r"SpecDecoding metrics: Mean acceptance length: \d.*by depth:( \d\.\d{3}){5}, Time per step: draft [1-9\d]"
    )


def wait_for_line(log: Path, pattern: str) -> None:
    for _ in range(60):
        if re.search(pattern, log.read_text()):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])

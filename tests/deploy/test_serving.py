"""Replicas on Ray Serve: their answers are plain decoding's, their numbers are told apart, and one may be killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.clients import NAME, Load, Stream, alive, family, replicas, until
from vllm_eagle.deploy import replicated
from vllm_eagle.deploy.local import deploy, serving, tree_metrics
from vllm_eagle.errors import EagleError

ENGINE = {"dtype": "float32", "enforce-eager": True, "max-num-seqs": 9, "block-size": 32}
CLIENTS, EACH, LENGTH = 16, 3, 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def application(folders: tuple[str, str], count: int | str, limit: int = 512, **options: Any) -> Any:
    model = {"model": folders[0], "speculative-model": folders[1], "served-model-name": NAME, "speculative-tree-size": 8}
    engine = model | ENGINE | {"max-model-len": limit}
    return replicated(engine, num_replicas=count, ray_actor_options={"num_cpus": 1}, **options)


def prompts() -> list[str]:
    return [f"w{20 + 3 * i} w{200 - i} w{5 + i % 7}" for i in range(CLIENTS * EACH)]


@pytest.fixture(scope="module")
def texts(folders: tuple[str, str]) -> dict[str, str]:
    """What plain decoding writes."""
    from tests.integration.harness import engine, greedy

    outs = engine(folders[0]).generate(prompts(), greedy(LENGTH), use_tqdm=False)
    return {out.prompt: out.outputs[0].text for out in outs}


def load(url: str, length: int = LENGTH, each: int = EACH) -> Load:
    asked = prompts()
    return Load(url, [[Stream(prompt, length) for prompt in asked[i::CLIENTS][:each]] for i in range(CLIENTS)])


def check(streams: list[Stream], texts: dict[str, str], length: int = LENGTH) -> None:
    for stream in streams:
        assert stream.error is None and stream.finish == "length"
        assert stream.text == texts[stream.prompt] if length == LENGTH else texts[stream.prompt].startswith(stream.text)


def counted(names: set[str]) -> dict[str, dict[str, float]]:
    """Return the numbers of trees, once Ray has exported those of all replicas."""
    until(lambda: names <= {name for name, found in tree_metrics().items() if found.get("num_drafts_total")}, "metrics")
    return tree_metrics()


@pytest.fixture(scope="module")
def one(folders: tuple[str, str], texts: dict[str, str]) -> Iterator[str]:
    with serving(application(folders, 1), port=free_port(), cpus=2, logs=False) as url:
        yield url


def test_one_replica(one: str, texts: dict[str, str]) -> None:
    """Catches a plugin that is not loaded in a replica or its engine, and numbers Ray cannot export."""
    asked = load(one, each=1).start()
    asked.wait()
    check(asked.streams, texts)
    (name,) = replicas()
    assert {stream.replica for stream in asked.streams} == {name}
    counted({name})
    until(
        lambda: tree_metrics()[name]["num_drafts_total"] == tree_metrics()[name]["tree_verified_nodes_count"], "the last export"
    )
    numbers = tree_metrics()[name]
    assert numbers["num_draft_tokens_total"] > numbers["num_drafts_total"] > 0
    assert 0 < numbers["num_accepted_tokens_total"] < numbers["num_draft_tokens_total"]
    assert numbers["tree_drafted_nodes_sum"] >= numbers["tree_verified_nodes_sum"] > 0
    own = urllib.request.urlopen(one + "/metrics").read().decode()
    assert float(re.findall(r"^vllm:spec_decode_num_draft_tokens_total\S* (\S+)$", own, re.M)[0]) > 0


@pytest.mark.slow
def test_an_engine_that_dies_is_replaced(one: str, texts: dict[str, str]) -> None:
    """Catches a replica that stays in service with a dead engine: health checks ask the engine."""
    ((name, pid),) = replicas().items()
    below = family(pid)[1:]
    assert any(process.memory_info().rss > 200 << 20 for process in below)  # the engine, whatever it is called
    for process in below:
        process.kill()
    until(lambda: replicas() and name not in replicas(), "another replica")
    asked = Load(one, [[Stream(prompts()[0], LENGTH)]]).start()
    asked.wait()
    check(asked.streams, texts)


def test_a_head_that_does_not_fit(one: str, folders: tuple[str, str], tmp_path: Path) -> None:
    """Catches a replica started over and over in silence, and a reason that stays in a log."""
    from ray import serve

    from vllm_eagle.testing import tiny_head

    head = tiny_head(tmp_path / "wide", hidden=32)
    with pytest.raises(EagleError, match=r"no replica starts: .*hidden"):
        deploy(application((folders[0], head), 1, max_constructor_retry_count=1), name="other", route_prefix="/other")
    serve.delete("other")


@pytest.mark.slow
def test_one_of_two_is_killed(folders: tuple[str, str], texts: dict[str, str]) -> None:
    """Catches other requests that suffer, an answer cut short without an error, and an engine left behind by its replica."""
    with serving(application(folders, 2), port=free_port(), cpus=2, logs=False) as url:
        before = replicas()
        asked = load(url).start()
        until(lambda: all(len(asked.running(name)) >= 3 for name in before), "both write")
        name, pid = next(iter(before.items()))
        members = family(pid)
        os.kill(pid, signal.SIGKILL)
        asked.wait()
        hurt = [stream for stream in asked.streams if stream.error]
        assert 3 <= len(hurt) <= CLIENTS and {stream.replica for stream in hurt} <= {name, ""}
        check([stream for stream in asked.streams if not stream.error], texts)
        assert all(texts[stream.prompt].startswith(stream.text) and not stream.finish for stream in hurt)
        until(lambda: not alive(members), "the killed replica's engine ends")
        until(lambda: len(replicas()) == 2 and name not in replicas(), "it comes back")
        again = load(url, each=2).start()
        again.wait()
        check(again.streams, texts)
        spread = Counter(stream.replica for stream in again.streams)
        assert spread.keys() == replicas().keys()
        counted(set(replicas()))


@pytest.mark.slow
def test_replicas_come_and_go_with_the_load(folders: tuple[str, str], texts: dict[str, str]) -> None:
    """Catches a queue that starts no second replica, and one taken away before the answers it is writing are whole."""
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4, "metrics_interval_s": 0.5}
    scaling |= {"look_back_period_s": 2, "upscale_delay_s": 0, "downscale_delay_s": 20}
    app = application(folders, "auto", limit=2000, autoscaling_config=scaling)
    with serving(app, port=free_port(), cpus=2, logs=False) as url:
        assert len(replicas()) == 1
        while len(replicas()) < 2:  # more would leave the second one no time to start on two cores
            busy = Load(url, [[Stream(prompt, LENGTH)] for prompt in prompts()[:6]]).start()
            busy.wait()
            check(busy.streams, texts)
        both = set(replicas())
        few = Load(url, [[Stream(prompt, 1500)] for prompt in prompts()[:4]]).start()
        until(lambda: all(few.running(name) for name in both), "both write")
        until(lambda: len(replicas()) == 1, "one is taken away")
        (gone,) = both - replicas().keys()
        assert gone in replicas("STOPPING") and few.running(gone)  # it still writes
        few.wait()
        assert {stream.replica for stream in few.streams} == both
        for stream in few.streams:
            assert stream.error is None and stream.finish == "length" and stream.text.startswith(texts[stream.prompt])
        until(lambda: gone not in replicas("STOPPING"), "it ends")

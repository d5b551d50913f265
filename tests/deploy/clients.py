"""Clients of an application on Ray Serve, and a look at its replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import psutil

NAME = "tiny"
PATIENCE = 600  # seconds until something that never comes is given up


@dataclass
class Stream:
    """One request, as far as it has come."""

    prompt: str
    length: int
    replica: str = ""
    text: str = ""
    chunks: int = 0
    finish: str | None = None
    error: Exception | None = None

    def ask(self, url: str) -> None:
        """Read the whole answer, or its error."""
        body: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.length, "temperature": 0}
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        try:
            with client.completions.with_streaming_response.create(
                model=NAME, stream=True, extra_body={"ignore_eos": True}, **body
            ) as answer:
                self.replica = answer.headers["x-replica"]
                for chunk in answer.parse():
                    self.text += chunk.choices[0].text
                    self.finish = chunk.choices[0].finish_reason or self.finish
                    self.chunks += 1
        except (openai.APIError, httpx.HTTPError) as wrong:
            self.error = wrong
        finally:
            client.close()


@dataclass
class Load:
    """Clients that each ask their prompts one after the other."""

    url: str
    queues: Sequence[Sequence[Stream]]
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> Load:
        """Send all clients off."""
        for queue in self.queues:
            self.threads.append(threading.Thread(target=self._work, args=(queue,), daemon=True))
            self.threads[-1].start()
        return self

    def _work(self, queue: Sequence[Stream]) -> None:
        for stream in queue:
            stream.ask(self.url)

    @property
    def streams(self) -> list[Stream]:
        """Return all requests."""
        return [stream for queue in self.queues for stream in queue]

    def running(self, replica: str) -> list[Stream]:
        """Return those a replica is answering just now."""
        return [s for s in self.streams if s.replica == replica and s.chunks > 2 and not s.finish and not s.error]

    def wait(self) -> None:
        """Wait for the end of all."""
        for thread in self.threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self.threads)


def replicas(*states: str) -> dict[str, int]:
    """Return the process of each replica in one of the states, by default those that take requests."""
    from ray.serve.context import _get_global_client

    details = _get_global_client().get_serve_details()
    found = details["applications"]["default"]["deployments"]["Engine"]["replicas"]
    return {one["replica_id"]: one["pid"] for one in found if one["state"] in (states or ("RUNNING",))}


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return those that have not ended."""
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def until(true: Callable[[], Any], what: str) -> None:
    """Wait for something."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.05)

"""A real `vllm serve` on a tiny target, with trees or without, and raw HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_eagle.testing import tiny_head, tiny_target

NAME = "tiny"
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--max-logprobs", "10"]
JSON = {"Content-Type": "application/json"}
PATIENCE = 60
"""Seconds after which a request or a start counts as hung; an answer takes milliseconds."""
GOOD: dict[str, Any] = {"model": NAME, "prompt": "abba", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@dataclass(frozen=True)
class Reply:
    """What came back: status 0 if the connection broke, -1 if nothing came in time."""

    status: int
    body: bytes = b""

    def json(self) -> Any:
        """Return the body parsed, None if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
        """Send one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, JSON if headers is None else headers)
            answer = connection.getresponse()
            return Reply(answer.status, answer.read())
        except TimeoutError:
            return Reply(-1)
        except (OSError, http.client.HTTPException):
            return Reply(0)
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Reply:
        """Send a JSON body."""
        return self.send("POST", path, json.dumps(body).encode())

    def good_text(self) -> str:
        """Return the answer to a request that is always the same."""
        reply = self.post("/v1/completions", **GOOD)
        assert reply.status == 200, (reply, self.tail())
        return str(reply.json()["choices"][0]["text"])

    def children(self, title: str) -> list[psutil.Process]:
        """Return the processes below the server whose title contains `title`: EngineCore, Worker."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in below if title in " ".join(child.cmdline())]

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text()[-3000:]

    def wait(self) -> None:
        """Wait until it answers."""
        for _ in range(10 * PATIENCE):
            assert self.process.poll() is None, self.tail()
            if self.send("GET", "/health").status == 200:
                return
            time.sleep(0.5)
        raise AssertionError(self.tail())

    def end(self) -> None:
        """End it and everything it started."""
        family = [psutil.Process(self.process.pid), *self.children("")] if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        psutil.wait_procs(family, timeout=20)
        for left in family:
            if left.is_running():
                left.kill()
        self.process.wait()


def models(folder: Path) -> tuple[str, str]:
    """Write a target of letters and a head that guesses right now and then."""
    target = tiny_target(folder / "target", vocab=300, letters=True, damping=0.002)
    return target, tiny_head(folder / "head", vocab=300, copies=True)


@contextmanager
def serving(folders: tuple[str, str], folder: Path, trees: bool) -> Iterator[Server]:
    """Run a server for a while, with trees or without."""
    target, head = folders
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["vllm", "serve", target, "--port", str(port), "--served-model-name", NAME, *FLAGS]
    if trees:
        command += ["--speculative-model", head, "--speculative-tree-size", "12"]
    wanted = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder / f"{'trees' if trees else 'plain'}-{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | wanted, start_new_session=True)
    server = Server(process, port, log)
    try:
        server.wait()
        yield server
    finally:
        server.end()

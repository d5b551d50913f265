"""The contestants' processes: started when first needed, kept while memory lasts, asleep while another is measured."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_eagle.bench.child import Job, Outcome, Settings
from vllm_eagle.bench.contestants import Contestant
from vllm_eagle.envs import preload


class ContestantFailed(Exception):
    """Say why a contestant could not be measured."""


def command(contestant: Contestant) -> list[str]:
    """Return the command line of a contestant's process."""
    return [sys.executable, "-m", contestant.module]


def environment(threads: int) -> dict[str, str]:
    """Return the environment all contestants run in: the same threads and OpenMP, asleep after 5 ms without work."""
    own = os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    own.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the size that settings ask for
    for name, value in (("KMP_BLOCKTIME", "5"), ("VLLM_LOGGING_LEVEL", "WARNING"), ("TOKENIZERS_PARALLELISM", "false")):
        own.setdefault(name, value)
    return own | {"LD_PRELOAD": preload() or os.environ.get("LD_PRELOAD", "")}


class Process:
    """One contestant's process."""

    def __init__(self, line: Sequence[str], settings: Settings, env: Mapping[str, str], log: Path) -> None:
        """Start it and wait until it is ready; raises `ContestantFailed`."""
        self._log = log
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=dict(env), text=True
            )
        self._ask(dataclasses.asdict(settings))

    def measure(self, job: Job) -> Outcome:
        """Have a job done; raises `ContestantFailed`."""
        return Outcome(**self._ask(dataclasses.asdict(job)))

    def end(self) -> None:
        """Let it go: it ends when its input does."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(line), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise ContestantFailed(self._last_words()) from None
        said = self._process.stdout.readline()
        if not said:
            raise ContestantFailed(self._last_words())
        answer: dict[str, Any] = json.loads(said)
        if "failed" in answer:
            raise ContestantFailed(answer["failed"])
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "without a word")
        return f"ended with status {self._process.wait()}: {last}"


class Crew:
    """Measure any contestant; at most `resident` processes live at once, the one longest unused makes room."""

    def __init__(
        self,
        settings: Callable[[Contestant], Settings],
        env: Mapping[str, str],
        logs: Path,
        resident: int,
        warm_up: Job,
        command: Callable[[Contestant], list[str]] = command,
    ) -> None:
        """`logs` is a folder for what the processes print; every new one does `warm_up` before it is measured."""
        self._settings, self._env, self._logs, self._resident = settings, env, logs, resident
        self._warm_up, self._command = warm_up, command
        self._running: dict[str, Process] = {}  # the longest unused first
        logs.mkdir(parents=True, exist_ok=True)

    def measure(self, contestant: Contestant, job: Job) -> Outcome:
        """Have a job done; raises `ContestantFailed`, after which the process is gone."""
        process = self._running.pop(contestant.name, None) or self._start(contestant)
        self._running[contestant.name] = process
        try:
            return process.measure(job)
        except ContestantFailed:
            self._running.pop(contestant.name).end()
            raise

    def _start(self, contestant: Contestant) -> Process:
        while len(self._running) >= self._resident:
            self._running.pop(next(iter(self._running))).end()
        log = self._logs / f"{contestant.name.replace(':', '-')}.log"
        process = Process(self._command(contestant), self._settings(contestant), self._env, log)
        process.measure(self._warm_up)
        return process

    def end(self) -> None:
        """End all processes."""
        while self._running:
            self._running.popitem()[1].end()

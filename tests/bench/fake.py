"""Contestants that answer at once, and a run of them that is killed at a given measurement.

python -m tests.bench.fake run FOLDER KILL_AT       measure plain, ngram, suffix and hf; KILL_AT 0: to the end
python -m tests.bench.fake NAME FOLDER KILL_AT      be one of them
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from vllm_eagle.bench.child import Answer, Job, Outcome, Settings, serve
from vllm_eagle.bench.contestants import Contestant, parse_all
from vllm_eagle.bench.crew import Crew, environment
from vllm_eagle.bench.journal import Journal
from vllm_eagle.bench.rounds import Plan, race
from vllm_eagle.bench.workloads import Workload

WARM_UP = Job([[5]], 1, 0.0, 1)


def start(settings: Settings) -> Answer:
    note(f"start {settings.contestant}")
    print("a library prints to standard output")
    if settings.contestant == "suffix":
        raise ImportError("no package\n  of that name")
    return lambda job: answer(settings.contestant, job)


def answer(name: str, job: Job) -> Outcome:
    if job.tokens > 1:
        note(f"{name} {job.concurrency}")
        if kill_at and len([line for line in noted() if not line.startswith("start")]) == kill_at:
            os.kill(os.getppid(), signal.SIGKILL)
    if job.tokens == 13:
        print("out of luck", file=sys.stderr)
        os._exit(3)
    return Outcome(2.0 if name == "plain" else 1.0, [[1, 2]] * len(job.prompts), [0.1], [0.2])


def note(line: str) -> None:
    with (folder / "noted").open("a") as file:
        file.write(line + "\n")


def noted() -> list[str]:
    return (folder / "noted").read_text().splitlines()


def crew_of(folder: Path, kill_at: int = 0, resident: int = 9) -> Crew:
    def command(contestant: Contestant) -> list[str]:
        return [sys.executable, "-m", "tests.bench.fake", contestant.name, str(folder), str(kill_at)]

    def settings(contestant: Contestant) -> Settings:
        return Settings(contestant.name, "model", None, "float32", False, 10, 2, 100)

    return Crew(settings, environment(1), folder / "logs", resident, WARM_UP, command)


def run(folder: Path, kill_at: int) -> None:
    contestants = parse_all(["ngram", "suffix", "hf"], head=False)
    plan = Plan(contestants, (Workload("mt", ((1, 2), (3,))),), (0.0,), (1, 2), 2, 4, 2)
    crew = crew_of(folder, kill_at)
    race(plan, crew, Journal(folder, {"tokens": 4}))
    crew.end()


if __name__ == "__main__":
    who, folder, kill_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if who == "run":
        run(folder, kill_at)
    else:
        serve(start)

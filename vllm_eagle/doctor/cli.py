"""The command `vllm-eagle doctor`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from vllm_eagle.doctor import installation, machine
from vllm_eagle.doctor.finding import Finding, Level, bad, good
from vllm_eagle.envs import preload
from vllm_eagle.errors import EagleError

_ABOUT = """\
Look over the installation and the machine, and with --target and --head whether the two fit, what memory serving them
takes, and what a row costs here (the curve that decides how large trees may be). One line for each finding, one of
advice where there is something to do. The exit status is 0 if serving will work, 1 if not.

  example: vllm-eagle doctor
  example: vllm-eagle doctor --target MODEL --head HEAD
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `doctor`."""
    command = subparsers.add_parser(
        "doctor",
        help="say whether serving will work here, and how well",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--target", metavar="MODEL", help="folder of the target")
    command.add_argument("--head", metavar="HEAD", help="folder of its EAGLE head")
    command.add_argument("--dtype", default="float32", help="what the target is served in (default: %(default)s)")
    command.add_argument("--no-curve", action="store_true", help="start no engine: half a minute less")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if bool(arguments.target) != bool(arguments.head):
        raise EagleError("give --target and --head together, or neither")
    worst = Level.GOOD
    for found in _findings(arguments):
        print(found, flush=True)
        worst = max(worst, found.level, key=list(Level).index)
    print({Level.BAD: "\nserving will not work yet", Level.NOTE: "\nserving will work", Level.GOOD: "\nall is well"}[worst])
    return int(worst is Level.BAD)


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    broken = False
    for found in installation.look():
        broken |= found.level is Level.BAD
        yield found
    yield from machine.look()
    if broken or not arguments.target:
        return
    fit = _examine("fit", arguments)
    if "error" in fit:
        yield bad(fit["error"], f"vllm-eagle inspect {arguments.head} --target {arguments.target} shows what the folder holds")
        return
    yield good(f"{fit['architecture']} of {fit['layers']} layers and this {fit['kind']} head fit, in {fit['dtype']}")
    enough = machine.memory(fit["weights"], fit["cache"])
    yield enough
    if arguments.no_curve or enough.level is Level.BAD:
        return
    print("       starting an engine to measure what rows cost (about half a minute)", file=sys.stderr, flush=True)
    measured = _examine("curve", arguments)
    if "error" in measured:
        yield bad(f"an engine does not start: {measured['error']}", "start `vllm serve` with the same flags to see its log")
        return
    from vllm_eagle.doctor import curve  # numpy

    yield Finding(
        Level.GOOD,
        f"a step of the target without context, by rows:\n{curve.plot(measured['rows'], measured['seconds'])}",
        curve.advice(measured["rows"], measured["seconds"]),
    )


def _examine(what: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask vLLM in a process of its own: what it dies of is a finding, too."""
    line = [sys.executable, "-m", "vllm_eagle.integration.examine", what, arguments.target, arguments.head, arguments.dtype]
    env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "LD_PRELOAD": preload() or os.environ.get("LD_PRELOAD", "")}
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        said = [text.strip() for text in done.stderr.splitlines() if text.strip()]
        return {"error": said[-1][:300] if said else f"vLLM ended with status {done.returncode} and said nothing"}
    return found

"""The `vllm-eagle` command. Subcommands import what they need when they run: `--help` stays fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_eagle.errors import EagleError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; bad input ends in one line on standard error and status 2."""
    arguments = parse(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except EagleError as bad:
        print(f"vllm-eagle: {bad}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; a command that passes flags on to vLLM gets those it does not know in the field it names."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if (field := getattr(arguments, "passes_on", None)) is not None:
        setattr(arguments, field, rest)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """Collect the subcommands of every room."""
    from vllm_eagle.batch.cli import add_commands as add_batch
    from vllm_eagle.bench.cli import add_commands as add_bench
    from vllm_eagle.checkpoints.cli import add_commands as add_checkpoints
    from vllm_eagle.demo.cli import add_commands as add_demo
    from vllm_eagle.deploy.cli import add_commands as add_deploy
    from vllm_eagle.doctor.cli import add_commands as add_doctor
    from vllm_eagle.trace.cli import add_commands as add_trace
    from vllm_eagle.train.cli import add_commands as add_train

    parser = argparse.ArgumentParser(prog="vllm-eagle", description="Tree speculative decoding with EAGLE heads for vLLM.")
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_demo(subparsers)
    add_batch(subparsers)
    add_deploy(subparsers)
    add_doctor(subparsers)
    add_trace(subparsers)
    add_checkpoints(subparsers)
    add_train(subparsers)
    add_bench(subparsers)
    return parser


def _version() -> str:
    from vllm_eagle import __version__

    return f"vllm-eagle {__version__}"


if __name__ == "__main__":
    sys.exit(main())

"""The `vllm-eagle` command. Subcommands import what they need when they run: `--help` stays fast."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vllm_eagle.errors import EagleError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; bad input ends in one line on standard error and status 2."""
    arguments = parse(argv)
    try:
        status = int(arguments.run(arguments) or 0)
        sys.stdout.flush()
        return status
    except EagleError as bad:
        print(f"vllm-eagle: {bad}", file=sys.stderr)
        return 2
    except ImportError as wrong:
        if (name := broken_companion(wrong)) is None:
            raise
        from vllm_eagle import setup_env

        fix = setup_env.REPAIR
        print(f"vllm-eagle: {name} was built for another torch, and transformers dies of it; {fix}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has enough of it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def broken_companion(wrong: BaseException) -> str | None:
    """Return the package built for another torch of whose import this error comes, if it does."""
    from vllm_eagle import setup_env

    at: BaseException | None = wrong
    while at is not None:
        frame = at.__traceback__
        while frame is not None:
            module = frame.tb_frame.f_globals.get("__name__", "").partition(".")[0]
            if module in setup_env.COMPANIONS:
                return str(module)
            frame = frame.tb_next
        at = at.__cause__ or at.__context__
    return None


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

"""The command `vllm-eagle demo`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vllm_eagle.arguments import head_folder
from vllm_eagle.envs import preload

_ABOUT = """\
Answer a few prompts with plain vLLM and with trees, side by side in one process, once for each head; the text streams
as it is written. Ends with a table: tokens per second of all, their ratio, the mean accepted length, and whether the
texts are identical. Without options it uses SmolLM2-135M-Instruct and the heads that come with the repository.
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `demo`."""
    command = subparsers.add_parser(
        "demo",
        help="answer a few prompts with and without trees",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--model", type=Path, help="folder of the target (default: SmolLM2-135M-Instruct, prepared on first use)"
    )
    command.add_argument(
        "--head",
        type=head_folder,
        nargs="+",
        help="its EAGLE heads, folders or OWNER/NAME on the hub, compared with each other (default: those in examples/heads)",
    )
    command.add_argument("--tree-size", type=int, default=12, metavar="N", help="most nodes of a tree (default: %(default)s)")
    command.add_argument("--tree-depth", type=int, default=4, metavar="N", help="levels of the tree (default: %(default)s)")
    command.add_argument("--tokens", type=int, default=96, metavar="N", help="length of an answer (default: %(default)s)")
    command.add_argument(
        "--prompts", type=int, default=6, metavar="N", help="how many of the demo's prompts (default: %(default)s)"
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    prepare_process()
    from vllm_eagle.demo.model import demo_heads, demo_model
    from vllm_eagle.demo.show import show

    return show(
        arguments.model or demo_model(),
        arguments.head or demo_heads(),
        tree_size=arguments.tree_size,
        tree_depth=arguments.tree_depth,
        tokens=arguments.tokens,
        count=arguments.prompts,
    )


def prepare_process() -> None:
    """Keep the engine in this process and its log short; start again with Intel's OpenMP preloaded, as vLLM asks for on x86."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if wanted := preload():
        os.environ["LD_PRELOAD"] = wanted
        os.execv(sys.executable, [sys.executable, "-m", "vllm_eagle.cli", *sys.argv[1:]])

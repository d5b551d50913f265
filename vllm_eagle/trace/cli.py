"""The command `vllm-eagle trace`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from vllm_eagle.arguments import head_folder
from vllm_eagle.errors import EagleError

_ABOUT = """\
Answer one prompt and write a page that shows how the answer came: every token coloured by the depth of the tree it was
accepted from, and, step by step, the drafted tree with the head's probabilities, the accepted path, the rows verified,
and the milliseconds of drafting, verifying and committing. One HTML file, no network. Without options it uses
SmolLM2-135M-Instruct and the head that comes with the repository.

  example: vllm-eagle trace "Why is the sky blue?" --out sky.html

A server started with --speculative-trace FOLDER writes the same page for a request that asks for it:
"vllm_xargs": {"speculative_trace": true}
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `trace`."""
    command = subparsers.add_parser(
        "trace",
        help="show how an answer came, tree by tree, as a page",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("prompt", metavar="PROMPT", help="what the user says; the chat template is applied")
    command.add_argument("--out", type=Path, default=Path("trace.html"), metavar="FILE", help="(default: %(default)s)")
    command.add_argument(
        "--model", type=Path, help="folder of the target (default: SmolLM2-135M-Instruct, prepared on first use)"
    )
    command.add_argument("--head", type=head_folder, help="its EAGLE head, also OWNER/NAME (default: in examples/heads)")
    command.add_argument("--tree-size", type=int, default=25, metavar="N", help="most nodes of a tree (default: %(default)s)")
    command.add_argument("--tree-depth", type=int, default=5, metavar="N", help="levels of the tree (default: %(default)s)")
    command.add_argument("--tokens", type=int, default=128, metavar="N", help="longest answer (default: %(default)s)")
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0, the best token always)")
    command.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from vllm_eagle.demo.cli import prepare_process

    if not arguments.out.parent.is_dir():
        raise EagleError(f"--out {arguments.out}: there is no folder {arguments.out.parent}; make it first")
    prepare_process()
    from vllm_eagle.demo.model import demo_head, demo_model

    model, head = arguments.model or demo_model(), arguments.head or demo_head()
    with tempfile.TemporaryDirectory() as folder:
        sampling = {"temperature": arguments.temperature, "seed": arguments.seed} if arguments.temperature else {}
        shape = {"tree_size": arguments.tree_size, "tree_depth": arguments.tree_depth}
        written = trace(model, head, arguments.prompt, arguments.tokens, folder, shape, sampling)
        arguments.out.write_bytes(written.read_bytes())
    print(f"\n\nopen {arguments.out} in a browser")
    return 0


def trace(
    model: Path, head: Path, prompt: str, tokens: int, folder: str, shape: dict[str, Any], sampling: dict[str, Any]
) -> Path:
    """Answer `prompt`, streaming the text; return the page, which lies in `folder`."""
    from vllm_eagle.integration.session import Session

    print("starting vLLM with trees (about 15 seconds)", flush=True)
    session = Session(model, tokens, head=head, trace=folder, **shape)
    session.answer("Hello!", limit=8)  # warm, so that the first steps are like the others
    session.answer(
        prompt,
        on_text=lambda piece: print(piece, end="", flush=True),
        extra_args={"speculative_trace": True},
        **sampling,
    )
    session.settle()
    (page,) = Path(folder).glob("*.html")
    return page

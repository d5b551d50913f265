"""The command `vllm-eagle ray-demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_eagle.arguments import head_folder

_ABOUT = """\
Start two replicas of a chat model with trees behind one address on this machine, ask them from several clients at once,
and show who answered what and how each replica's drafts did; then stop everything. Without options it uses
SmolLM2-135M-Instruct and the head that comes with the repository. Needs the extra `ray`.
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `ray-demo`."""
    command = subparsers.add_parser(
        "ray-demo",
        help="two replicas behind one address, on this machine",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--model", type=Path, help="folder of the target (default: SmolLM2-135M-Instruct)")
    command.add_argument("--head", type=head_folder, help="its EAGLE head, also OWNER/NAME (default: in examples/heads)")
    command.add_argument("--replicas", type=int, default=2, metavar="N", help="default: %(default)s")
    command.add_argument("--clients", type=int, default=4, metavar="N", help="requests at once (default: %(default)s)")
    command.add_argument("--tokens", type=int, default=64, metavar="N", help="length of an answer (default: %(default)s)")
    command.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from vllm_eagle.demo.model import demo_head, demo_model
    from vllm_eagle.deploy.application import ray_serve
    from vllm_eagle.deploy.demo import show
    from vllm_eagle.heads.checkpoint import check_folder

    ray_serve()
    model, head = arguments.model or demo_model(), arguments.head or demo_head()
    check_folder(head)
    return show(
        model,
        head,
        replicas=arguments.replicas,
        clients=arguments.clients,
        tokens=arguments.tokens,
        port=arguments.port,
    )

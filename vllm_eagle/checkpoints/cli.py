"""The commands `vllm-eagle inspect` and `vllm-eagle convert`."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_eagle.arguments import read_layers

_INSPECT = """\
Say what a head is: kind and layout, what it reads and drafts, every setting that changes what it computes, tensors used,
unused and missing, and how to serve it. Nothing is said by a head's name: kind and layout are told from its folder.

With --target the head is held against a model: hidden size, vocabulary, layers. The answer is also the exit status:
0 it can be served, 1 it cannot (every reason is named), 2 the folder is no head we can read.

  example: vllm-eagle inspect OWNER/HEAD --target MODEL
  in a script: vllm-eagle inspect HEAD --target MODEL > /dev/null && vllm serve MODEL --speculative-model HEAD
"""

_CONVERT = """\
Write a head again in another layout: original (what fit writes, and most released heads are) or speculators (that of
the library of this name). The numbers stay bit for bit; the draft vocabulary and the model card are copied beside them.
All layouts are served, so this is for other engines, and for a head whose config.json names the wrong layers.

  example: vllm-eagle convert heads/mine/head --layout speculators --model MODEL --out heads/mine-speculators
  other layers: vllm-eagle convert HEAD --layout original --aux-layers 3,17,30 --out heads/shifted
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register both; each sets `run` to a handler that takes the parsed arguments."""
    cmd = _command(subparsers, "inspect", _INSPECT)
    cmd.add_argument("head", metavar="HEAD", help="folder of the head, or its OWNER/NAME on the hub")
    cmd.add_argument("--target", metavar="MODEL", help="folder or OWNER/NAME of the model it should draft for")
    cmd.add_argument("--aux-layers", type=read_layers, metavar="I,J,K", help="layers an EAGLE-3 head is to read instead")
    cmd.set_defaults(run=_inspect)
    cmd = _command(subparsers, "convert", _CONVERT)
    cmd.add_argument("head", metavar="HEAD", help="folder of the head, or its OWNER/NAME on the hub")
    cmd.add_argument("--layout", choices=("original", "speculators"), required=True)
    cmd.add_argument("--out", type=Path, required=True, help="folder for the head in that layout")
    cmd.add_argument("--model", help="folder or OWNER/NAME of the target, which the speculators layout names")
    cmd.add_argument("--aux-layers", type=read_layers, metavar="I,J,K", help="layers to name in place of the head's own")
    cmd.set_defaults(run=_convert)


def _command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    head = text.split(":")[0].replace("\n", " ")
    return subparsers.add_parser(name, help=head, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def _inspect(args: argparse.Namespace) -> int:
    from vllm_eagle.checkpoints.inspect import inspect
    from vllm_eagle.heads.checkpoint import Checkpoint
    from vllm_eagle.heads.hub import find_folder
    from vllm_eagle.heads.target import TargetShape

    target = None if args.target is None else TargetShape.read(args.target)
    found = inspect(Checkpoint.look(find_folder(args.head)), args.head, target, args.aux_layers)
    print(found)
    return 1 if found.troubles else 0


def _convert(args: argparse.Namespace) -> None:
    from vllm_eagle.checkpoints.convert import convert

    convert(args.head, args.layout, args.out, args.model, args.aux_layers)
    print(f"{args.out}: {args.layout} layout")

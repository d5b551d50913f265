"""Readers of command-line values that several commands share; they import what they need when they are used."""

from __future__ import annotations

import argparse
from pathlib import Path


def head_folder(text: str) -> Path:
    """Read a head's place, a folder or a hub's OWNER/NAME[@REVISION], which is fetched; raises `argparse.ArgumentTypeError`."""
    from vllm_eagle.errors import HeadError
    from vllm_eagle.heads.hub import find_folder

    try:
        return find_folder(text)
    except HeadError as bad:
        raise argparse.ArgumentTypeError(str(bad)) from None


def read_layers(text: str) -> list[int]:
    """Read I,J,K of a command line; raises `argparse.ArgumentTypeError`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers; want I,J,K") from None

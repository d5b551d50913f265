"""The curves of a fit: TensorBoard events while it runs and a picture at its end, each where its package is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_MISSING = "{what} not written: {package} is not installed (pip install 'vllm_eagle[train]')"


def curves(line: Mapping[str, object]) -> dict[str, float]:
    """Return the named points of a journal line; held-out acceptance gets a name for each depth."""
    points = {name: float(value) for name, value in line.items() if isinstance(value, int | float) and name != "step"}
    held = line.get("held_out")
    if isinstance(held, Mapping):
        points |= {f"held_out/{depth}-alpha": rate for depth, rate in enumerate(held["alpha"])}
        points["held_out/chain_length"] = held["chain_length"]
    return points


def open_board(folder: Path) -> Any:
    """Return a TensorBoard writer for `folder`/events, or None where tensorboard is not installed, in one line."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(_MISSING.format(what="TensorBoard events", package="tensorboard"))
        return None
    return SummaryWriter(str(folder / "events"))


def draw(folder: Path) -> None:
    """Draw `curves.png` from `journal.jsonl`: loss, and held-out acceptance by depth, over steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(_MISSING.format(what="curves.png", package="matplotlib"))
        return
    found: dict[str, dict[int, float]] = {}  # by name: step -> value; a resumed fit overwrites the steps it repeats
    for line in _lines(folder / "journal.jsonl"):
        for name, value in curves(line).items():
            found.setdefault(name, {})[line["step"]] = value
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*_points(found.get("loss", {})))
    left.set(title="training loss", xlabel="step")
    for name in sorted(name for name in found if name.endswith("-alpha")):
        right.plot(*_points(found[name]), marker=".", label=name.removeprefix("held_out/").replace("alpha", "α"))
    right.set(title="held-out acceptance by depth", xlabel="step")
    if right.lines:
        right.legend()
    figure.savefig(folder / "curves.png", dpi=120)


def _lines(journal: Path) -> Iterator[dict[str, Any]]:
    for text in journal.read_text().splitlines() if journal.is_file() else ():
        with suppress(ValueError):  # a line torn by a kill
            yield json.loads(text)


def _points(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]

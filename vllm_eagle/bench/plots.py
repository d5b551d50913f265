"""The plots, where matplotlib is installed: the ratio to plain decoding over concurrency, and tokens per second."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Tables = Sequence[Mapping[str, Any]]


def draw(folder: Path, tables: Tables) -> list[Path]:
    """Draw two pictures per workload and temperature; none, and a line that says so, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("plots not written: matplotlib is not installed (pip install 'vllm_eagle[bench]')")
        return []
    paths = []
    for workload, temperature in dict.fromkeys((table["workload"], table["temperature"]) for table in tables):
        some = [table for table in tables if (table["workload"], table["temperature"]) == (workload, temperature)]
        for name, fill in (("ratio", _ratio), ("rate", _rate)):
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            axes = figure.subplots()
            fill(axes, some)
            axes.set_title(f"{workload}, T = {temperature:g}")
            axes.legend(fontsize="small", ncols=2)
            path = folder / f"{name}-{re.sub(r'[^A-Za-z0-9_.]+', '-', workload)}-t{temperature:g}.png"
            figure.savefig(path, dpi=110)
            paths.append(path)
    return paths


def _rows(tables: Tables) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Return each contestant's rows: place of the table, row."""
    found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for place, table in enumerate(tables):
        for row in table["rows"]:
            if "absent" not in row:
                found.setdefault(row["contestant"], []).append((place, row))
    return found


def _ratio(axes: Any, tables: Tables) -> None:
    for name, rows in _rows(tables).items():
        points = [(tables[place]["concurrency"], row["ratio"]) for place, row in rows if row["ratio"]]
        below, above = ([abs(r[end] - r["median"]) for _, r in points] for end in ("min", "max"))
        axes.errorbar(
            [at for at, _ in points], [r["median"] for _, r in points], (below, above), marker="o", capsize=3, label=name
        )
    axes.set_xscale("log", base=2)
    ticks = [table["concurrency"] for table in tables]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="requests at once", ylabel="tokens/s, ratio to plain vLLM")
    axes.grid(alpha=0.3)


def _rate(axes: Any, tables: Tables) -> None:
    found = _rows(tables)
    width = 0.8 / max(1, len(found))
    for number, (name, rows) in enumerate(found.items()):
        at = [place + (number - (len(found) - 1) / 2) * width for place, _ in rows]
        axes.bar(at, [row["tokens_per_s"]["median"] for _, row in rows], width, label=name)
    for place, table in enumerate(tables):
        label = "limit of plain decoding" if place == 0 else None
        axes.hlines(table["plain_limit"], place - 0.45, place + 0.45, linestyles="dashed", colors="gray", label=label)
    axes.set_xticks(range(len(tables)), [str(table["concurrency"]) for table in tables])
    axes.set(xlabel="requests at once", ylabel="tokens/s")

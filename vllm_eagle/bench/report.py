"""What a run leaves: tables on the screen, `results.json` in one line, plots, and a page that needs no other file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_eagle.bench.page import choice, page
from vllm_eagle.bench.plots import draw

HEADINGS = ("contestant", "tokens/s", "ratio", "first token ms", "ms per token", "accepted", "nodes", "texts equal")


def write(folder: Path, results: Mapping[str, Any]) -> str:
    """Write everything into `folder` and return the line of JSON."""
    line = json.dumps(results)
    (folder / "results.json").write_text(line + "\n")
    (folder / "index.html").write_text(page(results, draw(folder, results["tables"])))
    return line


def tables(results: Mapping[str, Any]) -> str:
    """Return the tables for a terminal."""
    return "\n\n".join(_table(table) for table in results["tables"])


def title(table: Mapping[str, Any]) -> str:
    """Return what was measured, in words."""
    return f"{table['workload']} · T={table['temperature']:g} · {table['concurrency']} at once"


def _table(table: Mapping[str, Any]) -> str:
    rows = [list(HEADINGS)] + [_cells(row) for row in table["rows"] if "absent" not in row]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    absent = [f"{row['contestant']}: {row['absent']}" for row in table["rows"] if "absent" in row]
    limit = f"plain decoding cannot exceed {table['plain_limit']:g} tokens/s on this machine"
    return "\n".join([f"{title(table)} · {limit}", *lines, *choice(table), *absent])


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio = row["ratio"]
    return [
        row["contestant"] + (" (best chain)" if row.get("best_chain") else ""),
        middle(row["tokens_per_s"]),
        "-" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f}…{ratio['max']:.2f})",
        middle(row["first_token_ms"]),
        middle(row["per_token_ms"]),
        "-" if row["accepted_length"] is None else f"{row['accepted_length']:.2f}",
        "-" if row["nodes"] is None else f"{row['nodes']:.1f}",
        equality(row),
    ]


def middle(spread: Mapping[str, float] | None) -> str:
    """Return the median, for people."""
    return "-" if spread is None else f"{spread['median']:g}"


def equality(row: Mapping[str, Any]) -> str:
    """Return how many texts equal plain decoding's; n/a where only the distribution is the same."""
    return "n/a" if row["equal_texts"] is None else f"{row['equal_texts']} of {row['texts']}"

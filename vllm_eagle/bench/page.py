"""The page: plots, every number, and where they come from, in one file without links to others."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 2rem; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #8886; padding: .25rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left }
td small { opacity: .7 }
img { max-width: 100%; background: white }
"""
_SPREADS = {
    "tokens_per_s": "tokens/s",
    "ratio": "ratio to plain",
    "first_token_ms": "first token, ms",
    "per_token_ms": "ms per token",
}
_SINGLE = {"accepted_length": "mean accepted length", "nodes": "nodes per draft", "drafts": "drafts"}
_READ = """Medians over rounds, least and most in small print. Ratios are between measurements of the same round.
Texts equal: answers whose token ids are plain vLLM's; n/a where a contestant promises the same distribution only.
Nodes per draft are those verified; sizes are those of trees drafted, as upper limit of a bucket: count."""


def page(results: Mapping[str, Any], plots: Sequence[Path]) -> str:
    """Return the whole page; every number of `results` stands in it."""
    body = [f"<h1>vllm-eagle bench</h1>\n<p>{_READ}</p>"]
    body += [f'<img alt="{escape(plot.stem)}" src="data:image/png;base64,{_inline(plot)}">' for plot in plots]
    body += [_table(table) for table in results["tables"]]
    for name in ("machine", "run", "provenance"):
        body.append(f"<h2>{name.capitalize()}</h2>\n{_pairs(results[name])}")
    if results["failed"]:
        body.append(f"<h2>Not measured</h2>\n{_pairs(results['failed'])}")
    head = f'<meta charset="utf-8">\n<title>vllm-eagle bench</title>\n<style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{chr(10).join(body)}\n</body>\n</html>\n'


def choice(table: Mapping[str, Any]) -> list[str]:
    """Return a line that holds `auto` against the fastest choice of size, if it took part."""
    if (found := table["auto_to_best"]) is None:
        return []
    share = f"{found['median']} ({found['min']}…{found['max']})"
    return [f"auto: {share} of the fastest with this head or none, {found['best']}"]


def _inline(plot: Path) -> str:
    return base64.b64encode(plot.read_bytes()).decode()


def _table(table: Mapping[str, Any]) -> str:
    title = f"{escape(table['workload'])}, T = {table['temperature']}, {table['concurrency']} at once"
    headings = ["contestant", *_SPREADS.values(), *_SINGLE.values(), "sizes", "texts equal"]
    rows = "\n".join(_row(row, len(headings)) for row in table["rows"])
    limit = f"On this machine plain decoding cannot exceed {table['plain_limit']} tokens/s."
    said = "<br>".join([limit, *map(escape, choice(table))])
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<h2>{title}</h2>\n<p>{said}</p>\n<table>\n<tr>{head}</tr>\n{rows}\n</table>"


def _row(row: Mapping[str, Any], columns: int) -> str:
    name = escape(row["contestant"]) + (" (best chain)" if row.get("best_chain") else "")
    if "absent" in row:
        return f'<tr><td>{name}</td><td colspan="{columns - 1}">{escape(row["absent"])}</td></tr>'
    cells = [name, *(_spread(row[key]) for key in _SPREADS), *(_plain(row[key]) for key in _SINGLE)]
    cells.append(", ".join(f"{escape(upper)}: {count}" for upper, count in row["sizes"].items()) or "–")
    equal = "n/a" if row["equal_texts"] is None else row["equal_texts"]
    cells.append(f"{equal} of {row['texts']}")
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _spread(value: Mapping[str, float] | None) -> str:
    return "–" if value is None else f"{value['median']} <small>{value['min']}…{value['max']}</small>"


def _plain(value: object) -> str:
    return "–" if value is None else str(value)


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(_text(value))}</td></tr>" for name, value in values.items())
    return f"<table>\n{rows}\n</table>"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

"""From measurements to figures: a rate per round, its ratio to plain decoding of the same round, then medians and spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from vllm_eagle.bench.contestants import AUTO, PLAIN, parse
from vllm_eagle.bench.journal import Cell, Measurement

Spread = dict[str, float]


def spread(values: Sequence[float]) -> Spread | None:
    """Return median, least and most, to four digits; None of nothing."""
    if not values:
        return None
    return {"median": digits(median(values)), "min": digits(min(values)), "max": digits(max(values))}


def digits(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def summarise(
    measurements: Iterable[Measurement], failed: Mapping[str, str], names: Sequence[str], limit: Callable[[int], float]
) -> list[dict[str, Any]]:
    """Return a table per cell with a row per contestant; `limit` gives plain decoding's bound by concurrency."""
    cells: dict[Cell, dict[str, dict[int, Measurement]]] = {}
    for one in measurements:  # of a round made twice the later one holds
        cells.setdefault(one.cell, {}).setdefault(one.contestant, {})[one.round] = one
    tables = []
    for cell, found in cells.items():
        rows = [_row(name, found.get(name, {}), found.get(PLAIN, {}), failed, cell) for name in names]
        _mark_best_chain(rows)
        tables.append(
            {
                "workload": cell.workload,
                "temperature": cell.temperature,
                "concurrency": cell.concurrency,
                "plain_limit": digits(limit(cell.concurrency)),
                "auto_to_best": _auto_to_best(found),
                "rows": rows,
            }
        )
    return tables


def _auto_to_best(found: Mapping[str, Mapping[int, Measurement]]) -> dict[str, Any] | None:
    """Return `auto` by the fastest choice of size it could have made: no drafts, or another contestant with the same head."""
    ratios: dict[str, list[float]] = {}
    for name, own in found.items():
        rounds = own.keys() & found.get(AUTO, {}).keys()
        if rounds and (name == PLAIN or (name != AUTO and parse(name).needs_head)):
            pairs = [(found[AUTO][number], own[number]) for number in sorted(rounds)]
            ratios[name] = [mine.tokens / mine.seconds * theirs.seconds / theirs.tokens for mine, theirs in pairs]
    if not ratios:
        return None
    best = min(ratios, key=lambda name: median(ratios[name]))
    return {"best": best, **(spread(ratios[best]) or {})}


def losses(tables: Iterable[Mapping[str, Any]], floor: float) -> list[Mapping[str, Any]]:
    """Return the tables in which `auto` reaches less than `floor` of the fastest choice of size."""
    return [table for table in tables if (found := table["auto_to_best"]) is not None and found["median"] < floor]


def _row(
    name: str, own: Mapping[int, Measurement], plain: Mapping[int, Measurement], failed: Mapping[str, str], cell: Cell
) -> dict[str, Any]:
    if not own:
        why = "not measured yet" if parse(name).serves(cell.concurrency) else "answers one request at a time"
        return {"contestant": name, "absent": failed.get(name, why)}
    rounds = sorted(own.keys() & plain.keys())
    rates = {number: one.tokens / one.seconds for number, one in own.items()}
    drafts, drafted, accepted = (sum(getattr(one, what) for one in own.values()) for what in ("drafts", "drafted", "accepted"))
    sizes: Counter[str] = Counter()
    for one in own.values():
        sizes.update(one.sizes)
    row = {
        "contestant": name,
        "tokens_per_s": spread(list(rates.values())),
        "ratio": spread([rates[number] * plain[number].seconds / plain[number].tokens for number in rounds]),
        "first_token_ms": spread([1000 * one.first for one in own.values()]),
        "per_token_ms": spread([1000 * one.rest for one in own.values() if one.rest is not None]),
        "accepted_length": digits(1 + accepted / drafts) if drafts else None,
        "nodes": digits(drafted / drafts) if drafted else None,
        "drafts": drafts,
        "sizes": dict(sizes),
        "equal_texts": None,
        "texts": sum(len(own[number].texts) for number in rounds),
    }
    if parse(name).repeats(cell.temperature):
        pairs = [pair for number in rounds for pair in zip(own[number].texts, plain[number].texts, strict=True)]
        row["equal_texts"] = sum(mine == theirs for mine, theirs in pairs)
    return row


def _mark_best_chain(rows: Sequence[dict[str, Any]]) -> None:
    chains = [row for row in rows if parse(row["contestant"]).kind == "chain" and row.get("tokens_per_s")]
    if len(chains) > 1:
        best = max(chains, key=lambda row: (row["ratio"] or row["tokens_per_s"])["median"])
        best["best_chain"] = True

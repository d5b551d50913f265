from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle.bench.page import page
from vllm_eagle.bench.report import tables, write


def results() -> dict[str, Any]:
    """Make up results in which no two numbers are the same."""
    numbers = count(1001)

    def some() -> dict[str, float]:
        return {end: next(numbers) + 0.5 for end in ("median", "min", "max")}

    def row(name: str, equal: int | None) -> dict[str, Any]:
        spreads = {key: some() for key in ("tokens_per_s", "ratio", "first_token_ms", "per_token_ms")}
        single = {key: next(numbers) for key in ("accepted_length", "nodes", "drafts")}
        return {
            "contestant": name,
            **spreads,
            **single,
            "sizes": {"8": next(numbers), "+Inf": next(numbers)},
            "equal_texts": equal,
            "texts": next(numbers),
        }

    def table(concurrency: int) -> dict[str, Any]:
        rows = [row("plain", next(numbers)), row("chain:2", None) | {"best_chain": True}, row("<b>", 7001)]
        rows.append({"contestant": "suffix", "absent": "needs <a package>"})
        head = {"workload": "mt", "temperature": next(numbers) + 0.25, "concurrency": concurrency}
        return {**head, "plain_limit": next(numbers), "auto_to_best": {"best": "<b>", **some()}, "rows": rows}

    return {
        "tables": [table(next(numbers)), table(next(numbers))],
        "failed": {"suffix": "needs <a package>"},
        "machine": {"read_gb_s": next(numbers), "threads": next(numbers)},
        "run": {"concurrency": [next(numbers), next(numbers)], "tokens": next(numbers)},
        "provenance": {"command": "vllm-eagle bench --tokens 8", "commit": "abc1234"},
    }


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def test_every_number_is_on_the_page() -> None:
    """Catches a column that the page leaves out."""
    made_up = results()
    html = page(made_up, [])
    found = list(numbers_of(made_up))
    assert len(found) > 100
    assert [number for number in found if not re.search(rf"(?<![\d.]){re.escape(str(number))}(?![\d.])", html)] == []
    assert "chain:2 (best chain)" in html and "n/a of" in html and "abc1234" in html


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """Catches a picture or a style that is missing where the page is sent, and a name that becomes markup."""
    pytest.importorskip("matplotlib")
    line = write(tmp_path, results())
    html = (tmp_path / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', html) == []
    assert "http" not in re.sub(r"base64,[^\"]+", "", html) and "url(" not in html
    assert "<b>" not in html and "<a package>" not in html and "&lt;b&gt;" in html and "needs &lt;a package&gt;" in html
    plots = sorted(path.name for path in tmp_path.glob("*.png"))
    assert html.count("data:image/png") == len(plots) == 4  # two temperatures, ratio and rate
    assert all((tmp_path / plot).read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert "\n" not in line
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(line) == results()


def test_without_matplotlib_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an hour of measuring lost for want of a picture."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    write(tmp_path, results())
    assert capsys.readouterr().out.count("\n") == 1
    assert "<table>" in (tmp_path / "index.html").read_text()


def test_the_screen_shows_medians_and_reasons() -> None:
    """Catches a table whose columns do not line up, or a contestant that vanishes."""
    made_up = results()
    first, second = tables(made_up).split("\n\n")
    lines = first.splitlines()
    assert len(lines) == 7 and len({len(line) for line in lines[1:5]}) == 1
    assert lines[5].startswith(f"auto: {made_up['tables'][0]['auto_to_best']['median']} (") and lines[5].endswith(", <b>")
    assert lines[6] == "suffix: needs <a package>"
    assert f"{made_up['tables'][1]['rows'][0]['tokens_per_s']['median']:g}" in second
    assert "n/a" in lines[3] and f"7001 of {made_up['tables'][0]['rows'][2]['texts']}" in lines[4]

"""One server without trees, which answers everything and ends; then one with them, whose drafter knows these texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.cases import (
    CASES,
    CROWD,
    DEPTH,
    FLAGS,
    LONG,
    NODES,
    PARSERS,
    REPLIES,
    REPORT,
    SCRIPTED,
    STOPS,
    Plain,
    ask,
    ask_all,
    end,
    scripted,
)
from tests.serving.doubles import ZERO
from tests.serving.server import Server, serving
from vllm_eagle import speculate
from vllm_eagle.testing import tiny_head, tiny_target


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    return tiny_target(root / "target", vocab=300, letters=True), tiny_head(root / "head", vocab=300)


@pytest.fixture(scope="package")
def plain(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    found = Plain(folders[0])
    with serving(tmp_path_factory.mktemp("plain") / "log", folders[0], *FLAGS, *PARSERS, *SCRIPTED) as server:
        found.record(server, CASES)
        free = found.whole["greedy"].choices[0]
        found.record(server, {name: make(free["text"], free["ids"]) for name, make in STOPS.items()})
        found.record(server, {name: scripted(folders[0], reply, 0) for name, reply in REPLIES.items()})
        found.crowd = [ask(server, body) for body in CROWD]  # each alone
        found.long = ask_all(server, LONG)
        found.ending = end(server)
    return found


@pytest.fixture(scope="package")
def options(folders: tuple[str, str], plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of an engine whose drafter knows the texts."""
    return knowing(folders[1], plain, tmp_path_factory.mktemp("texts") / "texts.json")


def knowing(head: str, plain: Plain, texts: Path) -> dict[str, Any]:
    """Write the texts down, a reply once for every depth, and return arguments of an engine whose drafter knows them."""
    known = plain.texts()
    for name in REPLIES:
        known += [[ZERO + depth, *plain.whole[name].texts[0][1:]] for depth in range(DEPTH + 1)]
    texts.write_text(json.dumps(known))
    shape = {"texts": str(texts), "depth": DEPTH, "width": 2, "sibling": 1, "vocab": 260}
    drafter = {"drafter": "tests.serving.doubles.Told", "drafter_options": shape}
    return speculate(head, tree_size=NODES, tree_depth=DEPTH, **drafter)


def flags(options: dict[str, Any]) -> list[str]:
    """Write arguments of an engine as flags of vLLM's command line."""
    written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return [part for name, value in written.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(scope="package")
def trees(folders: tuple[str, str], options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("trees") / "log"
    with serving(log, folders[0], *FLAGS, *PARSERS, *SCRIPTED, *REPORT, *flags(options)) as server:
        yield server

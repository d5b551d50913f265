"""What the README and docs/ show: links lead somewhere, commands exist, options are real."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_eagle.cli import build_parser

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def pages(repository: Path) -> list[Path]:
    return [repository / "README.md", *sorted((repository / "docs").glob("*.md")), *sorted(repository.glob("examples/**/*.md"))]


def shown(page: Path) -> Iterator[str]:
    """Yield every line of a page that a reader would type, continued lines joined."""
    for _, block in FENCE.findall(page.read_text()):
        yield from block.replace("\\\n", " ").split("\n")


def headings(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in re.findall(r"^#+ .*$", text, re.M)}


def test_links_lead_somewhere(repository: Path) -> None:
    """Catches a page that was renamed, and a heading."""
    broken = []
    for page in pages(repository):
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
            if re.match(r"https?://", target):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in headings(there)):
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_every_page_is_reached(repository: Path) -> None:
    """Catches a page nobody finds."""
    reached, todo = set(), [repository / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", page.read_text())
            todo += [there for link in links if (there := (page.parent / link).resolve()).is_file()]
    assert set((repository / "docs").glob("*.md")) <= reached


def test_commands_parse(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command or an option that is shown and does not exist."""

    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(message)

    monkeypatch.setattr(argparse.ArgumentParser, "error", refuse)
    wrong, parsed = [], 0
    scripts = sorted(repository.glob("configs/**/*.sh"))
    for page in [*pages(repository), *scripts]:
        lines = page.read_text().replace("\\\n", " ").split("\n") if page in scripts else shown(page)
        for line in lines:
            if not (found := re.match(r"\s*(?:\$ )?vllm-eagle (.*)", line.split(" #")[0])):
                continue
            words = shlex.split(found[1])
            try:
                build_parser().parse_args(words)
                parsed += 1
            except ValueError as bad:
                wrong.append(f"{page.name}: {line.strip()}: {bad}")
            except SystemExit:
                parsed += 1  # --help
    assert not wrong
    assert parsed > 10


def test_flags_of_the_server_exist(repository: Path) -> None:
    """Catches a flag of ours that was renamed and is still shown."""
    from vllm_eagle.integration.patches import _FLAGS

    known = {flag for flag, *_ in _FLAGS} | {"--speculative-config"}
    for page in pages(repository):
        assert set(re.findall(r"--speculative[\w-]*\w", page.read_text())) <= known, page.name


def test_every_flag_is_shown(repository: Path) -> None:
    """Catches an option a reader of the README never learns of."""
    from vllm_eagle.integration.patches import _FLAGS

    text = (repository / "README.md").read_text()
    assert [flag for flag, *_ in _FLAGS if f"`{flag}" not in text] == []

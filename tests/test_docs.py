"""What the README and docs/ show: links lead somewhere, commands exist, options are real."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_eagle.cli import parse

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
                parse(words)
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


def code_of(page: Path) -> list[str]:
    return [block for language, block in FENCE.findall(page.read_text()) if language == "python"]


def test_the_drafter_shown_drafts(
    repository: Path, folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an example that was true of an earlier contract."""
    from tests.integration.harness import engine, generate, greedy
    from vllm_eagle import speculate

    (tmp_path / "my_drafters.py").write_text(code_of(repository / "docs" / "extending.md")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = [[5, 6, 7, 8, 5, 6, 7], [9, 9, 9], [3, 4]]
    expected = generate(engine(folders[0]), asked, greedy(60))
    tree = engine(folders[0], **speculate(drafter="my_drafters.Repeat", tree_size=8))
    assert generate(tree, asked, greedy(60)) == expected
    counters = {metric.name: metric.value for metric in tree.get_metrics() if hasattr(metric, "value")}
    assert counters["vllm:spec_decode_num_drafts"] > 0


def test_the_growth_shown_grows(repository: Path) -> None:
    """Catches an example that drops a parent, or a whole tree."""
    import torch

    from vllm_eagle.tree import CandidatePool

    place: dict[str, object] = {"__name__": "shown"}
    exec(code_of(repository / "docs" / "extending.md")[1], place)
    growth = place["Certain"](size=8, depth=3, top_k=3)  # type: ignore[operator]
    pool = CandidatePool(growth, 2)
    for level in range(3):
        shape = (2, pool.frontier.shape[1], 3)
        guesses = torch.rand(shape, generator=torch.Generator().manual_seed(level))
        tokens = torch.arange(guesses.numel()).view(shape) + 100 * level
        pool.add(tokens, guesses.log(), guesses)
        if level < 2:
            pool.expand()
    trees, values = pool.trees(torch.tensor([1, 2]))
    for tree in trees:
        tree.validate()
        assert tree.size >= 1
    assert float(values[:, 1:].max()) > -0.69 or values.shape[1] == 1


def test_the_page_on_scaling_shows_what_is_computed(repository: Path) -> None:
    """Catches a formula or a figure changed in the script and not on the page, or the other way round."""
    computed = runpy.run_path(str(repository / "benchmarks" / "scaling.py"))["tables"]()
    page = (repository / "docs" / "scaling.md").read_text()
    assert len(tables := computed.strip().split("\n\n")) == 3
    assert not [table for table in tables if table not in page]

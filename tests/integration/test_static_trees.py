"""Every tree of configs/tree is served."""

from __future__ import annotations

from pathlib import Path

from tests.integration.harness import counters, engine, generate, greedy, prompts, since
from vllm_eagle import speculate


def test_every_tree_kept_is_served(folders: tuple[str, str], repository: Path) -> None:
    """Catches a file that is read and grows, but whose shape an engine cannot hold."""
    target, head = folders
    asked = prompts([5, 40, 33])
    wanted = generate(engine(target), asked, greedy(24))
    files = sorted((repository / "configs" / "tree").glob("*.json"))
    assert len(files) >= 2
    for file in files:
        trees = engine(target, **speculate(head, tree=str(file)))
        before = counters(trees)
        assert generate(trees, asked, greedy(24)) == wanted, file.name
        found = since(before, counters(trees))
        assert found["accepted_tokens"] > 0
        assert found["draft_tokens"] > found["drafts"]

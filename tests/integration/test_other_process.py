"""Another process, and one without our plugin, does the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.integration.harness import ENGINE, engine, greedy, prompts, trace
from vllm_eagle import speculate

TREE = {"tree_size": 12, "tree_depth": 4, "tree_top_k": 4}
ASKED = prompts([5 + 9 * r for r in range(10)])


@pytest.fixture(scope="module")
def plain(folders: tuple[str, str]) -> LLM:
    """Before the other process runs: two at a time are too many for a small machine."""
    return engine(folders[0])


@pytest.fixture(scope="module")
def theirs(plain: LLM, folders: tuple[str, str], repository: Path) -> dict[str, Any]:
    """What the other process found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.other_process"],
        input=json.dumps([*folders, ASKED, ENGINE, TREE]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=repository,
        env=os.environ | {"VLLM_PLUGINS": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_77_without_speculation_the_plugin_changes_nothing(plain: LLM, theirs: dict[str, Any]) -> None:
    """Catches plain decoding that differs, in ids or metrics, for having us installed (scenario 77)."""
    assert theirs["ours"] == []
    assert [ids[:20] for ids in trace(plain, ASKED, greedy(20))[0]] == theirs["ids"]
    assert sorted({metric.name for metric in plain.get_metrics()}) == theirs["metrics"]
    assert len(theirs["metrics"]) > 20


def test_93_equal_runs_accept_equally(folders: tuple[str, str], plain: LLM, theirs: dict[str, Any]) -> None:
    """Catches acceptance that hangs on the hour, the process or what ran before (scenario 93)."""
    llm = engine(folders[0], **speculate(folders[1], **TREE))
    found = [trace(llm, ASKED, greedy(40)) for _ in range(3)]
    assert found == [found[0]] * 3
    assert list(found[0]) == theirs["trace"]
    assert found[0][0] == trace(plain, ASKED, greedy(40))[0]
    assert len({count for one in found[0][1] for count in one}) > 2

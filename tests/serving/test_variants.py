"""Other ways to start the same servers: another reasoning parser, and an end that lets requests finish."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.cases import DEPTH, ENDLESS, FLAGS, LONG, REPLIES, REPORT, SCRIPTED, Plain, ask_all, end, scripted
from tests.serving.conftest import flags, knowing
from tests.serving.server import serving, unlike

QWEN = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
DRAIN = ["--shutdown-timeout", "100"]


@pytest.mark.slow
def test_qwen3_and_draining(folders: tuple[str, str], tmp_path: Path) -> None:
    """Catches another parser's message that changes with runs, and a drained server that loses a text's end (scenario 85)."""
    found = Plain(folders[0])
    common = [*FLAGS, *QWEN, *SCRIPTED, *DRAIN]
    with serving(tmp_path / "plain", folders[0], *common) as server:
        found.record(server, {name: scripted(folders[0], reply, 0) for name, reply in REPLIES.items()})
        found.long = ask_all(server, [body | {"max_tokens": ENDLESS} for body in LONG])
        want = end(server, drains=True)
    trees = knowing(folders[1], found, tmp_path / "texts.json")
    with serving(tmp_path / "trees", folders[0], *common, *REPORT, *flags(trees)) as server:
        for name in REPLIES:
            asked = [scripted(folders[0], REPLIES[name], depth) for depth in range(DEPTH + 1)]
            for whole, streamed in zip(ask_all(server, asked), ask_all(server, asked, stream=True), strict=True):
                assert not unlike(found.whole[name], whole)
                assert not unlike(found.streamed[name], streamed)
        seen = end(server, drains=True)
    assert (seen.status, seen.left) == (want.status, want.left) == (0, [])
    assert [reader.outcome for reader in seen.readers] == ["length"] * len(LONG)
    assert [reader.text for reader in seen.readers] == [answer.choices[0]["text"] for answer in found.long]
    assert seen.readers == want.readers
    assert seen.errors <= want.errors

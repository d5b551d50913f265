"""Other ways to start the same servers: another reasoning parser, and an end that lets requests finish."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.serving.cases import (
    CROWD,
    DEPTH,
    ENDLESS,
    FLAGS,
    LONG,
    REPLIES,
    REPORT,
    SCRIPTED,
    Plain,
    ask_all,
    end,
    scripted,
)
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


@pytest.mark.slow
def test_two_engines_behind_one_server(
    folders: tuple[str, str], plain: Plain, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rank of `--data-parallel-size` that writes other texts, drafts nothing, or waits for the one without work."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with serving(tmp_path / "log", folders[0], *FLAGS, "--data-parallel-size", "2", *flags(options)) as server:
        for asked, wanted in ((CROWD, plain.crowd), (LONG[:1], plain.long[:1])):  # all at once, then one alone
            for stream in (False, True):
                for alone, together in zip(wanted, ask_all(server, asked, stream=stream), strict=True):
                    assert not unlike(alone, together)
        text = urllib.request.urlopen(server.url + "/metrics").read().decode()
    found = dict(re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)"[^}]*\} (\S+)$', text, re.M))
    assert found.keys() == {"0", "1"} and all(float(count) > 0 for count in found.values())

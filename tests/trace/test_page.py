from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_eagle.trace import Trace, TracedStep, page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WORDS = {1: "The", 2: " sea", 3: "\n", 4: "</script><b>", 5: " is", 6: " &amp;", 7: "'"}
READ = TracedStep([5], [-1], [1.0], [], [1], 9, 1, 0.0, 40.0, 0.0)
#     1 -- 2 -- 3        accepted: 2, 3; then the target's own 4
#       \- 5 -- 6
DRAFTED = TracedStep([1, 2, 5, 3, 6], [-1, 0, 0, 1, 2], [1.0, 0.7, 0.2, 0.4, 0.9], [1, 3], [2, 3, 4], 5, 3, 3.25, 51.5, 0.5)
TRACE = Trace("chat-<1>", "target", "head", [READ, DRAFTED])


def told(text: str) -> dict[str, object]:
    (data,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', text, re.S)
    found: dict[str, object] = json.loads(data)
    return found


def test_the_page_holds_what_it_shows() -> None:
    """Catches a text of a model that ends the script it stands in, and figures lost on the way."""
    text = page(TRACE, WORDS)
    found = told(text)
    assert found.pop("words") == {str(token): WORDS[token] for token in (1, 2, 3, 4, 5, 6)}
    assert found == asdict(TRACE)
    assert "<title>How an answer came: chat-&lt;1&gt;</title>" in text
    assert "{{" not in text


def test_it_needs_nothing_else() -> None:
    """Catches a page that looks right only where there is a network."""
    text = page(TRACE, WORDS).replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.findall(r"https?://|\bsrc=|\bhref=|@import|url\(", text)


@pytest.mark.skipif(BROWSER is None, reason="no chromium here; `.ci/run` installs it")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """Catches a script that fails in a browser: tokens, colours, the tree of the step asked for, and its path."""
    (tmp_path / "page.html").write_text(page(TRACE, WORDS), encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, f"file://{tmp_path}/page.html#step-2"], capture_output=True, text=True, timeout=120, check=True
    )
    seen = done.stdout[: done.stdout.index('<script type="application/json"')]
    answer = re.findall(r'<span[^>]*style="--c: ?var\(--(\w+)\);?"[^>]*>(.*?)</span>', seen.split('id="answer"')[1], re.S)
    assert answer[:4] == [("bonus", "The"), ("d1", " sea"), ("d2", "\n"), ("bonus", "&lt;/script&gt;&lt;b&gt;")]
    assert "step 2 of 2: 4 nodes drafted, 2 accepted · 5 rows verified, 2 other requests in the batch" in seen
    assert "3.3 ms draft, 51.5 ms verify, 0.5 ms commit" in seen
    assert [len(re.findall(f'<g class="{kind}"', seen)) for kind in ("in", "out", "bonus")] == [3, 2, 1]
    assert re.findall(r'class="p">(\d+ %)<', seen) == ["70 %", "20 %", "40 %", "90 %"]

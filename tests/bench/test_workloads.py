from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle.bench.workloads import read_workload
from vllm_eagle.errors import EagleError

ROWS: list[dict[str, Any]] = [
    {"category": "qa", "turns": ["one two", "never used"]},
    {"category": "qa", "turns": ["three"]},
    {"category": "rag", "turns": ["four five six"]},
]


class Words:
    """Turn words into their lengths; a chat begins with 9."""

    def __init__(self, chat: bool) -> None:
        self.chat_template = "chat" if chat else None

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        assert options["add_generation_prompt"]
        return "assistant " + conversation[0]["content"]

    def encode(self, text: str, **options: Any) -> list[int]:
        assert options.get("add_special_tokens", True) == (self.chat_template is None)
        return [len(word) for word in text.split()]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "spec_bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_categories_take_turns(file: str) -> None:
    """Catches a few prompts that are all of one kind."""
    taken = read_workload(file, Words(chat=True), 2, 100)
    assert (taken.name, taken.prompts) == ("spec_bench", ((9, 3, 3), (9, 4, 4, 3)))


def test_one_category(file: str) -> None:
    """Catches tasks measured together, and a second turn without its first."""
    taken = read_workload(f"{file}:qa", Words(chat=False), 8, 100)
    assert (taken.name, taken.prompts) == ("spec_bench:qa", ((3, 3), (5,)))
    with pytest.raises(EagleError, match=r"no prompt of category 'math' in .*; there are: qa, rag"):
        read_workload(f"{file}:math", Words(chat=False), 8, 100)


def test_long_prompts_are_passed_over(file: str) -> None:
    """Catches fewer prompts than asked for where others would do, and a prompt beyond the engine's length."""
    taken = read_workload(file, Words(chat=False), 2, 2)
    assert (taken.prompts, taken.too_long) == (((3, 3), (5,)), 1)
    with pytest.raises(EagleError, match="raise --max-prompt-tokens"):
        read_workload(f"{file}:rag", Words(chat=False), 2, 2)


def test_packed_files(tmp_path: Path) -> None:
    """Catches HumanEval read as text, and a download cut short that ends in a traceback."""
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f():"}\n'))
    assert read_workload(str(path), Words(chat=False), 1, 9).prompts == ((3, 4),)
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(EagleError, match="cannot be unpacked"):
        read_workload(str(path), Words(chat=False), 1, 9)

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_eagle.batch.rows import BadRow, count, lines, name, parse
from vllm_eagle.errors import EagleError


def test_what_may_stand_in_a_row() -> None:
    """Catches parameters lost, or taken for part of the row."""
    row = parse(4, b'{"id": "a", "prompt": "Hi", "temperature": 0.5, "seed": 3}')
    assert (row.index, row.id, row.prompt, row.messages) == (4, "a", "Hi", None)
    assert row.parameters == {"temperature": 0.5, "seed": 3}
    assert parse(0, b'{"prompt": [1, 2]}').prompt == [1, 2]
    assert parse(0, b'{"messages": [{"role": "user", "content": "Hi"}]}').messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "want an object with prompt or messages, not list"),
        (b'{"id": 1}', "one of the two"),
        (b'{"prompt": "a", "messages": []}', "one of the two"),
        (b'{"prompt": [1, "a"]}', "a list of token ids"),
        (b'{"prompt": [true]}', "a list of token ids"),
        (b'{"messages": "Hi"}', "objects with role and content"),
        (b'{"messages": ["Hi"]}', "objects with role and content"),
    ],
)
def test_a_row_that_is_none(line: bytes, says: str) -> None:
    """Catches a traceback, or a million rows that end with one of them."""
    with pytest.raises(BadRow, match=says):
        parse(0, line)


def test_the_id_of_a_bad_row() -> None:
    """Catches an error that cannot be matched to its row."""
    assert [name(line) for line in (b'{"id": 7}', b"{", b"[]", b"{}")] == [7, None, None, None]


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    """Catches counts that differ, so that a job never ends."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}')
    assert count(path) == len(list(lines(path))) == 2
    assert [index for index, _ in lines(path)] == [0, 1]


def test_a_file_of_nothing(tmp_path: Path) -> None:
    """Catches an engine started for no row."""
    with pytest.raises(EagleError, match="cannot be read"):
        count(tmp_path / "in.jsonl")
    (tmp_path / "in.jsonl").write_text("\n\n")
    with pytest.raises(EagleError, match="is empty"):
        count(tmp_path / "in.jsonl")

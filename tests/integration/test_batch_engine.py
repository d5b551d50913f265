"""What one row may do to a batch job; the whole command is in tests/batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_eagle.batch.rows import BadRow, parse
from vllm_eagle.integration.batch_engine import _prompt


def test_a_template_that_raises_costs_one_row() -> None:
    """Catches a model's chat template, which may raise anything, ending a job of a million rows."""

    def template(messages: Any, **options: Any) -> list[int]:
        raise ZeroDivisionError("roles must alternate")

    llm: Any = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(apply_chat_template=template))
    with pytest.raises(BadRow, match="does not take them"):
        _prompt(llm, parse(0, b'{"messages": [{"role": "user"}]}'))

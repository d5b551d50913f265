from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_eagle.errors import EagleError
from vllm_eagle.train.features import Example
from vllm_eagle.train.vocabulary import frequent_tokens, places, read_vocabulary, write_vocabulary


def test_most_frequent_first() -> None:
    """Catches prompt tokens that are counted, and an order that is not by frequency."""
    tokens = torch.tensor([9, 9, 9, 4, 4, 7])
    example = Example(tokens, torch.zeros(5, 2), torch.tensor([[4, 1], [4, 1], [7, 2]]), torch.tensor([[0.9, 0.1]] * 3))
    assert frequent_tokens([example], 10, 3).tolist() == [4, 7, 1]
    assert frequent_tokens([example], 10, 99).tolist() == [4, 7, 1, 2]  # never seen: never drafted
    assert places(torch.tensor([4, 7]), 9).tolist() == [-1, -1, -1, -1, 0, -1, -1, 1, -1]


def test_ids_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Catches a list made for a larger target."""
    path = tmp_path / "draft_vocab.json"
    write_vocabulary(path, torch.tensor([5, 300]))
    assert read_vocabulary(path, 301).tolist() == [5, 300]
    with pytest.raises(EagleError, match="another target"):
        read_vocabulary(path, 256)

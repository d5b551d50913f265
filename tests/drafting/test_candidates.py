"""Candidates: best first, with the draft vocabulary's ids, and clear errors for its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_eagle.drafting.candidates import DraftVocabulary, read_vocabulary
from vllm_eagle.errors import EagleError


def test_reduced_vocabulary_ranks_like_the_whole_one() -> None:
    """Catches an index into the reduced vocabulary handed out as a token id."""
    generator = torch.Generator().manual_seed(0)
    weight, features = torch.randn(50, 8, generator=generator), torch.randn(6, 8, generator=generator)
    tokens = torch.tensor([3, 7, 8, 20, 41, 49])
    whole = DraftVocabulary(lambda x: x @ weight.T)
    part = DraftVocabulary(lambda x: x @ weight[tokens].T, tokens)
    ids, logprobs = part(features, 3)
    scores = (features @ weight.T)[:, tokens]
    assert torch.equal(ids, tokens[scores.topk(3).indices])
    torch.testing.assert_close(logprobs, scores.log_softmax(-1).topk(3).values)
    ids, logprobs = whole(features, 3)
    torch.testing.assert_close(logprobs, (features @ weight.T).log_softmax(-1).gather(1, ids))


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "want a list"), ('["a"]', "want a list"), ("[1, 300]", "token 300 is outside"), ("[", "JSON")],
)
def test_bad_vocabulary_files(tmp_path: Path, content: str, message: str) -> None:
    """Catches a bad file that fails inside a step."""
    file = tmp_path / "words.json"
    file.write_text(content)
    with pytest.raises(EagleError, match=rf"words\.json.*{message}"):
        read_vocabulary(file, 256)
    with pytest.raises(EagleError, match="cannot be read"):
        read_vocabulary(tmp_path / "absent.json", 256)


def test_vocabulary_is_sorted_and_distinct(tmp_path: Path) -> None:
    """Catches a token that is two candidates: siblings carry distinct tokens."""
    file = tmp_path / "words.json"
    file.write_text("[5, 1, 5, 3]")
    assert read_vocabulary(file, 256).tolist() == [1, 3, 5]

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_eagle.errors import EagleError
from vllm_eagle.train.settings import read_settings


def test_words_win_over_the_file(tmp_path: Path) -> None:
    """Catches an option that has no effect."""
    path = tmp_path / "s.toml"
    path.write_text("steps = 300\nlayers = 2\nnoise = 0.1\n")
    settings = read_settings(path, ["steps=400", "noise=0.2"])
    assert (settings.fit.steps, settings.fit.noise, settings.layers) == (400, 0.2, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=300", "depht=3"], "unknown setting depht; known: accumulate, always"),
        ([], "steps is missing"),
        (["steps"], "not NAME=VALUE"),
        (["steps=10"], "lower warmup"),
        (["steps=300", "depths=0"], "1 or more"),
        (["steps=300", "accumulate=0"], "1 or more"),
        (["steps=300", "precision=fp8"], "'fp8': want float32 or bfloat16"),
    ],
)
def test_mistakes_name_the_setting(words: list[str], message: str) -> None:
    """Catches a misspelt or impossible setting that is silently ignored."""
    with pytest.raises(EagleError, match=message):
        read_settings(None, words)

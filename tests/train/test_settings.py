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


def test_a_recipe_brings_its_defaults() -> None:
    """Catches a feature loss in EAGLE-3, defaults that win over the user, and a card whose settings are refused."""
    settings = read_settings(None, ["steps=300", "recipe=eagle3"])
    assert (settings.fit.depths, settings.fit.feature_weight, settings.fit.token_weight, settings.fit.noise) == (6, 0, 1, 0)
    assert read_settings(None, ["steps=300", "recipe=eagle3", "depths=7"]).fit.depths == 7
    assert read_settings(None, ["steps=300"]).fit.depths == 4
    for words in (["steps=300"], ["steps=300", "recipe=eagle3"]):
        settings = read_settings(None, words)
        again = [f"{name}={value!r}" for name, value in settings.effective().items()]
        assert read_settings(None, again) == settings


def test_the_files_in_configs_are_accepted(repository: Path) -> None:
    """Catches a settings file that nobody can use any more."""
    recipes = {path.stem: read_settings(path, []).recipe for path in (repository / "configs" / "train").glob("*.toml")}
    assert {"eagle1", "eagle1-third", "eagle3"} <= set(recipes)
    assert recipes == {name: name.split("-")[0] for name in recipes}


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
        (["steps=300", "recipe=eagle2"], "unknown recipe eagle2; known: eagle1, eagle3"),
        (["steps=300", "recipe=eagle3", "noise=0.1", "always=5"], "always, noise has no effect in recipe eagle3"),
    ],
)
def test_mistakes_name_the_setting(words: list[str], message: str) -> None:
    """Catches a misspelt or impossible setting that is silently ignored."""
    with pytest.raises(EagleError, match=message):
        read_settings(None, words)

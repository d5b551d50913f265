"""Settings of a fit from a TOML file and from the command line, checked against one list."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_eagle.errors import EagleError
from vllm_eagle.train.fit import FitConfig

_DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle1": {},
    "eagle3": {"depths": 6, "feature_weight": 0.0, "token_weight": 1.0, "noise": 0.0},
}
"""What each recipe sets otherwise than `FitConfig` does."""

_NO_EFFECT = {"eagle1": (), "eagle3": ("feature_weight", "token_weight", "noise", "layers", "always", "sample")}
"""EAGLE-3 has no feature loss and one layer, and its LM head is trained over the whole draft vocabulary."""


@dataclass(frozen=True)
class Settings:
    """Hold a fit's settings, the head's kind and shape, and the vocabularies.

    `draft_vocabulary` is how many tokens are drafted from; `always` so many are in every loss, `sample` beside them.
    """

    fit: FitConfig
    recipe: str = "eagle1"
    layers: int = 1
    intermediate_size: int | None = None
    draft_vocabulary: int = 16384
    always: int = 2048
    sample: int = 1024

    def effective(self) -> dict[str, Any]:
        """Return what a settings file that repeats this fit has to say."""
        shape = {name: value for name, value in vars(self).items() if name != "fit" and value is not None}
        return {name: value for name, value in (shape | vars(self.fit)).items() if name not in _NO_EFFECT[self.recipe]}


def read_settings(path: Path | None, assignments: Sequence[str]) -> Settings:
    """Merge a TOML file and `NAME=VALUE` words; raises `EagleError` for an unknown name or a value of the wrong kind."""
    values: dict[str, Any] = {}
    try:
        if path is not None:
            values.update(tomllib.loads(path.read_text()))
        for word in assignments:
            values.update(_assignment(word))
    except (OSError, tomllib.TOMLDecodeError) as bad:
        raise EagleError(f"settings cannot be read: {bad}") from None
    known = {one.name for one in (*fields(FitConfig), *fields(Settings))} - {"fit"}
    if unknown := sorted(set(values) - known):
        raise EagleError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    recipe = values.get("recipe", Settings.recipe)
    if recipe not in _DEFAULTS:
        raise EagleError(f"unknown recipe {recipe}; known: {', '.join(_DEFAULTS)}")
    if idle := sorted(set(values) & set(_NO_EFFECT[recipe])):
        raise EagleError(f"setting {', '.join(idle)} has no effect in recipe {recipe}; remove it")
    values = _DEFAULTS[recipe] | values
    if "steps" not in values:
        raise EagleError("the number of steps is missing; give --set steps=N")
    shape = {name: values.pop(name) for name in list(values) if name not in {one.name for one in fields(FitConfig)}}
    try:
        return Settings(FitConfig(**values), **shape)
    except TypeError as bad:
        raise EagleError(f"a setting has the wrong kind of value: {bad}") from None


def _assignment(word: str) -> dict[str, Any]:
    name, equals, value = word.partition("=")
    if not equals:
        raise EagleError(f"{word!r} is not NAME=VALUE")
    try:
        return tomllib.loads(f"{name}={value}")
    except tomllib.TOMLDecodeError:
        return {name: value}

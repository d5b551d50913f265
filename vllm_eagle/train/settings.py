"""Settings of a fit from a TOML file and from the command line, checked against one list."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_eagle.errors import EagleError
from vllm_eagle.train.fit import FitConfig


@dataclass(frozen=True)
class Settings:
    """Hold a fit's settings, the head's shape, and the vocabularies: listed, always in the loss, sampled beside them."""

    fit: FitConfig
    layers: int = 1
    intermediate_size: int | None = None
    draft_vocabulary: int = 16384
    always: int = 2048
    sample: int = 1024


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

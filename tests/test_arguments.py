"""Values that several commands read."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_eagle.cli import parse

COMMANDS = [
    "demo --head {}",
    "trace Hi --head {}",
    "ray-demo --head {}",
    "bench --model m --head {}",
    "evaluate --model m --features f --head {}",
    "fit --model m --features f --out o --start {}",
]


def test_a_head_is_a_folder_or_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a command that takes a repository's name for a folder, and one that fails at length where there is none."""
    commit, repository = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--someone--a-head"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for line in COMMANDS:
        field = "start" if "--start" in line else "head"

        def read(text: str, line: str = line, field: str = field) -> object:
            found = getattr(parse(line.format(text).split()), field)
            return found[0] if isinstance(found, list) else found

        assert read("someone/a-head") == folder, line
        assert read("./someone/a-head") == Path("someone/a-head")
        with pytest.raises(SystemExit):
            read("nobody/nothing")
        assert "head nobody/nothing: no such folder, and no such repository in reach" in capsys.readouterr().err

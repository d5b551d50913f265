"""Tensors in one file or in shards, safe or pickled, in a folder or in the hub's cache."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.heads.variants import write
from vllm_eagle.errors import HeadError
from vllm_eagle.heads import check_folder, find_folder, load_head

CASE = "original EAGLE-3, wider target"


def shard(folder: Path, kind: str) -> None:
    """Split the only file of a folder in two."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    stem, ending = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    where = {name: f"{stem}-{1 + i % 2:05}-of-00002.{ending}" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        part = {name: tensors[name] for name in tensors if where[name] == file}
        save_file(part, folder / file) if kind == "safetensors" else torch.save(part, folder / file)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("kind", ["safetensors", "bin", "one bin"])
def test_68_files_of_every_kind(kind: str, tmp_path: Path) -> None:
    """Catches a folder refused for how its numbers are packed, or a shard forgotten (scenario 68)."""
    folder = write(CASE, tmp_path)
    before, path = load_head(folder).state_dict(), folder / "model.safetensors"
    if kind == "one bin":
        torch.save(load_file(path), folder / "pytorch_model.bin")
        path.unlink()
    else:
        shard(folder, kind)
    after = load_head(folder).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    lost = sorted(folder.glob("*0000*"))[-1:] or [folder / "pytorch_model.bin"]
    lost[0].unlink()
    with pytest.raises(HeadError, match=r"which the index names, is missing|no model\.safetensors"):
        check_folder(folder)


class Harmful:
    """Run code where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("code ran",))


def test_68_pickled_code_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches weights loaded as objects: a pickle runs what its author wants (scenario 68)."""
    folder = write(CASE, tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.zeros(1), "x": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(HeadError, match="cannot be read"):
        check_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(HeadError, match="cannot be read"):
        check_folder(folder)
    assert "code ran" not in capsys.readouterr().out


def test_an_outline_shows_shapes_before_numbers(tmp_path: Path) -> None:
    """Catches a pickled head whose wrong shape is found only after the target's weights are loaded."""
    folder = write(CASE, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors | {"fc.weight": tensors["fc.weight"][:, 1:]}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(HeadError, match=r"fc\.weight has shape \[32, 167\], its config\.json implies \[32, 168\]"):
        check_folder(folder)


_OFFLINE = """
import sys
from vllm_eagle.config import Options
from vllm_eagle.heads import find_folder, load_head
print(load_head(find_folder("someone/a-head")).config.kind, Options(model="someone/a-head").vocabulary_file().name)
print(load_head(find_folder("someone/a-head@main")).config.kind)
"""


def test_70_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a repository that only works with a network, and one that is nowhere said badly (scenario 70)."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--a-head"
    folder = write("speculators EAGLE-3, plain", repository / "snapshots" / commit)
    (folder / "draft_vocab.json").write_text("[1]")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        found = subprocess.run([sys.executable, "-c", _OFFLINE], capture_output=True, text=True)
        assert found.stdout.split() == ["EAGLE-3", "draft_vocab.json", "EAGLE-3"], found.stderr[-2000:]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HeadError, match="head nobody/nothing: no such folder, and no such repository in reach"):
        find_folder("nobody/nothing")
    assert find_folder(folder) == folder
    assert find_folder("no-such-folder") == Path("no-such-folder")

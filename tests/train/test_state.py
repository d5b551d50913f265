from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from vllm_eagle.errors import EagleError
from vllm_eagle.train import optimizers
from vllm_eagle.train.state import Journal, load_state, mean_record, save_state


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    head = nn.Linear(3, 3)
    save_state(tmp_path, head, optimizers.build(head, 0.1, 0.0), 7, "a fit")
    return tmp_path


def _load(folder: Path) -> int:
    head = nn.Linear(3, 3)
    return load_state(folder, head, optimizers.build(head, 0.1, 0.0), "a fit")


def test_a_full_disk_keeps_the_last_state(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a good state overwritten by half a new one, or a temporary file that keeps the disk full."""
    head = nn.Linear(3, 3)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", _full)
        with pytest.raises(EagleError, match=r"No space left on device.*free some space and run again"):
            save_state(saved, head, optimizers.build(head, 0.1, 0.0), 8, "a fit")
    assert _load(saved) == 7
    assert [path.name for path in saved.iterdir()] == ["state.pt"]


def test_a_full_disk_ends_the_journal_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback from the smallest of a fit's files."""
    monkeypatch.setattr(Path, "open", _full)
    with pytest.raises(EagleError, match="free some space and run again"):
        Journal(tmp_path).note({"step": 1})


def test_a_state_cut_in_half_is_named(saved: Path) -> None:
    """Catches a traceback from a copy that was interrupted, and a fit that silently begins anew over it."""
    os.truncate(saved / "state.pt", (saved / "state.pt").stat().st_size // 2)
    with pytest.raises(EagleError, match=r"state.pt cannot be read .*; remove it to begin again"):
        _load(saved)


def test_figures_are_means_of_the_batches_that_have_them() -> None:
    """Catches a depth that one batch did not reach, counted as zero."""
    assert mean_record([{"hit0": 0.2, "hit1": 0.5}, {"hit0": 0.4}]) == pytest.approx({"hit0": 0.3, "hit1": 0.5})

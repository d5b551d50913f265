from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vllm_eagle.train.curves import curves, draw, open_board
from vllm_eagle.train.state import Journal

LINES = [
    {"step": 0, "held_out": {"alpha": [0.1, 0.2], "chain_length": 1.1}},
    {"step": 20, "rounds": 9.0, "loss": 3.5, "hit0": 0.2},
    {"step": 20, "held_out": {"alpha": [0.3, 0.4], "chain_length": 1.4}},
]


def test_a_line_becomes_points() -> None:
    """Catches depths that share a name, and the step drawn as a curve."""
    assert curves(LINES[0]) == {"held_out/0-alpha": 0.1, "held_out/1-alpha": 0.2, "held_out/chain_length": 1.1}
    assert curves(LINES[1]) == {"rounds": 9.0, "loss": 3.5, "hit0": 0.2}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """Catches a picture that needs a display, or a line torn by a kill that ends a finished fit."""
    pytest.importorskip("matplotlib")
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (tmp_path / "journal.jsonl").write_text(text + '{"step": 40, "lo\n')
    draw(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_board_gets_every_point(tmp_path: Path) -> None:
    """Catches events that are never flushed, or written under another step."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    journal = Journal(tmp_path, open_board(tmp_path))
    for line in LINES:
        journal.note(dict(line))
    journal.close()
    read = events.EventAccumulator(str(tmp_path / "events")).Reload()
    held = [(point.step, round(point.value, 4)) for point in read.Scalars("held_out/0-alpha")]
    assert held == [(0, 0.1), (20, 0.3)]


def test_missing_packages_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a fit that fails at its very end for want of a picture."""
    for name in ("matplotlib", "matplotlib.figure", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    assert open_board(tmp_path) is None
    draw(tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert [("tensorboard" in line, "matplotlib" in line) for line in said] == [(True, False), (False, True)]

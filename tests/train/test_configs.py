"""Every settings file of configs/train starts a fit; the stages of a head follow each other as its script says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from vllm_eagle.heads import load_head
from vllm_eagle.train.cli import main
from vllm_eagle.train.settings import read_settings

STAGES = [
    ("eagle1.toml", None),
    ("eagle1-second.toml", "first"),
    ("eagle1-third.toml", "second"),
    ("eagle1-two-layers.toml", "third"),
    ("eagle1-two-layers-more.toml", "two"),
    ("eagle1-fourth.toml", "third"),
]
SMALL = ["steps=2", "batch_rounds=128", "warmup=1", "held_out_percent=10"]


def test_every_file_starts_a_fit(repository: Path, toy_folder: Path, toy_features: Path, tmp_path: Path) -> None:
    """Catches a setting that was renamed, and a stage that does not take the head of the one before."""
    files = {path.name for path in (repository / "configs" / "train").glob("*.toml")}
    assert files == {name for name, _ in STAGES} | {"eagle3.toml"}
    made = dict(zip(("first", "second", "third", "two", "more", "fourth"), STAGES, strict=True))
    for out, (name, start) in [(tmp_path / out, stage) for out, stage in made.items()] + [
        (tmp_path / "3", ("eagle3.toml", None))
    ]:
        line = ["fit", "--model", str(toy_folder), "--features", str(toy_features), "--out", str(out)]
        line += ["--settings", str(repository / "configs" / "train" / name)]
        if start:
            line += ["--start", str(tmp_path / start / "head")]
        assert main([*line, "--set", *SMALL, "draft_vocabulary=60"]) == 0, name
        assert all(bool(torch.isfinite(weight.float()).all()) for weight in load_head(out / "head").state_dict().values())
        assert json.loads((out / "journal.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_the_script_names_the_files(repository: Path) -> None:
    """Catches a script that makes a head from other settings than those kept beside it."""
    script = re.sub(r"[ \\]+\n? +", " ", (repository / "configs" / "train" / "smollm2-135m-eagle1.sh").read_text())
    start = r"(?: --start \"\$WORK/(\w+)/head\")?"
    found = re.findall(rf"--out \"\$WORK/(\w+)\"{start} --settings configs/train/([\w-]+\.toml)", script)
    assert [(file, start or None) for _, start, file in found] == STAGES
    for _, _, file in found:
        assert read_settings(repository / "configs" / "train" / file, []).fit.steps > 100

"""The whole command on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_eagle.cli import main
from vllm_eagle.doctor import Level, installation, machine
from vllm_eagle.doctor.finding import bad, good


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the models is fine, and quickly so."""
    monkeypatch.setattr(installation, "look", lambda: iter([good("installed")]))
    monkeypatch.setattr(machine, "look", lambda: iter([good("a machine")]))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.usefixtures("well")
def test_a_target_and_its_head(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an engine that starts for others and not for the doctor, and a curve of nothing."""
    target, head = folders
    assert main(["doctor", "--target", target, "--head", head]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM of 2 layers and this EAGLE-1 head fit, in float32" in out
    assert "1.0 K/V cache" in out
    assert out.count(" rows █") >= 8
    assert out.endswith("all is well\n")


@pytest.mark.usefixtures("well")
def test_a_head_for_another_target(folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches exit status 0 where `vllm serve` would refuse, and a reason that is not its own."""
    target, head = folders
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(head) / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 999}))
    assert main(["doctor", "--target", target, "--head", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "has a vocabulary of 999" in out
    assert out.endswith("serving will not work yet\n")


def test_a_broken_installation_is_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an engine started with an installation that is known to be broken."""
    monkeypatch.setattr(installation, "look", lambda: iter([bad("no vLLM", "install it")]))
    monkeypatch.setattr(machine, "look", lambda: iter([]))
    assert main(["doctor", "--target", "nowhere", "--head", "nowhere"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{Level.BAD.value:>5}  no vLLM"


def test_half_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a target that is ignored because the head was forgotten."""
    assert main(["doctor", "--target", "somewhere"]) == 2
    assert "give --target and --head together" in capsys.readouterr().err

"""Reading heads: round trips, and one clear line for every way a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_eagle.errors import HeadError
from vllm_eagle.heads import EagleHead, HeadConfig, load_head, save_head
from vllm_eagle.testing import tiny_head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_head(tmp_path / "head", layers=2))


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_round_trip_is_exact(folder: Path, tmp_path: Path) -> None:
    """Catches a tensor renamed, cast or dropped between save and load."""
    head = load_head(folder)
    save_head(head, tmp_path / "again", torch.float32)
    again = load_head(tmp_path / "again")
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_pickled_weights_and_a_copy_of_the_embedding(folder: Path) -> None:
    """Catches a released head refused: weights in pytorch_model.bin, the target's embedding along with them."""
    weights = load_file(folder / "model.safetensors")
    torch.save(weights | {"embed_tokens.weight": torch.zeros(256, 64)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(load_head(folder).fc.weight, weights["fc.weight"])


def test_defaults_of_released_configs() -> None:
    """Catches a meaning lost: no `bias` means a fusion bias, no K/V head count means one per head."""
    config = HeadConfig.from_hf(
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 10,
            "max_sequence_length": 77,
            "rope_theta": 5.0,
            "rope_scaling": {"type": "linear", "factor": 2},
        }
    )
    assert (config.fusion_bias, config.num_kv_heads, config.max_positions) == (True, 4, 77)
    assert config.rope == {"rope_type": "linear", "rope_theta": 5.0, "factor": 2}


def test_bad_folders(folder: Path, tmp_path: Path) -> None:
    """Catches a wrong head loaded in silence: everything wrong is named."""
    with pytest.raises(HeadError, match=r"no config\.json"):
        load_head(tmp_path / "nowhere")
    edit(folder, hidden_act="gelu")
    with pytest.raises(HeadError, match="hidden_act='gelu'"):
        load_head(folder)
    edit(folder, hidden_act="silu", intermediate_size=96)
    with pytest.raises(HeadError, match=r"mlp.* has shape \[128, 64\], its config.json implies \[96, 64\]"):
        load_head(folder)
    edit(folder, intermediate_size=128, bias=False)
    with pytest.raises(HeadError, match=r"fc\.bias is not part"):
        load_head(folder)
    edit(folder, bias=True, num_hidden_layers=3)
    with pytest.raises(HeadError, match=r"layers\.2\..* is missing"):
        load_head(folder)
    edit(folder, num_hidden_layers=2)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(HeadError, match="cannot be read"):
        load_head(folder)
    path.unlink()
    with pytest.raises(HeadError, match=r"no model\.safetensors"):
        load_head(folder)


def test_a_norm_where_eagle1_has_none(folder: Path) -> None:
    """Catches an EAGLE-3 or chat model taken for an EAGLE-1 head."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(HeadError, match=r"norm\.weight is not part of an EAGLE-1 head"):
        load_head(folder)


def test_angles_keep_their_digits_in_bfloat16(head: str) -> None:
    """Catches frequencies rounded with the weights: at position 2,000 such an angle is off by a radian or more."""
    exact, rounded = load_head(head), load_head(head, torch.bfloat16)
    assert rounded.fc.weight.dtype == torch.bfloat16
    positions = torch.arange(2048)
    torch.testing.assert_close(rounded.rotary.angles(positions), exact.rotary.angles(positions), rtol=0, atol=0)


def test_scaled_rotary_settings_load(tmp_path: Path) -> None:
    """Catches frequencies asked of a device without numbers while a folder's shapes are checked."""
    folder = Path(tiny_head(tmp_path))
    raw = json.loads((folder / "config.json").read_text())
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(raw | {"rope_parameters": scaled}))
    plain = HeadConfig.from_hf(raw)
    cos, _ = load_head(folder).rotary.angles(torch.tensor([8]))
    torch.testing.assert_close(cos, EagleHead(plain).rotary.angles(torch.tensor([2]))[0])


def test_a_full_disk_keeps_the_head_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a good head replaced by half a new one."""
    folder = Path(tiny_head(tmp_path))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_eagle.heads.checkpoint.save_file", full)
    with pytest.raises(HeadError, match="No space left on device"):
        save_head(load_head(folder), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

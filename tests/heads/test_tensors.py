"""Every tensor of every layout, renamed, dropped or of another shape: the error names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.heads.variants import CASES, edit_tensors, write
from vllm_eagle.errors import HeadError
from vllm_eagle.heads import check_folder, load_head

OPTIONAL = {"embed_tokens.weight"}
"""What a folder may lack: without it the target's embedding is read."""


EVERY_TENSOR = (
    *("original EAGLE-1, biases", "original EAGLE-1, two layers", "original EAGLE-1, embedding"),
    *("speculators EAGLE-1, biases", "speculators EAGLE-1, layernorms", "speculators EAGLE-1, embedding"),
    *(
        "original EAGLE-3, fusion bias",
        "original EAGLE-3, biases",
        "original EAGLE-3, norm_before_fc",
        "original EAGLE-3, together",
    ),
    *("speculators EAGLE-3, biases", "speculators EAGLE-3, norm_before_fc", "speculators EAGLE-3, together"),
)
"""Cases that have, together, every tensor of every layout."""


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_68_one_tensor_is_not_as_it_should_be(name: str, tmp_path: Path) -> None:
    """Catches a tensor that is ignored, made up or cut in silence (scenarios 66 and 68)."""
    folder = write(name, tmp_path)
    path = folder / "model.safetensors"
    tensors, wider = load_file(path), CASES[name][1].target_hidden_size is not None
    for one, tensor in tensors.items():
        others = {other: t for other, t in tensors.items() if other != one}
        longer = torch.cat((tensor, tensor[:1]))
        changes = {"dropped": others, "misshaped": others | {one: longer}, "renamed": others | {f"{one}_": tensor}}
        if one in OPTIONAL and not wider:
            del changes["dropped"]
        for changed, content in changes.items():
            save_file(content, path, metadata={"format": "pt"})
            with pytest.raises(HeadError) as caught:
                check_folder(folder)
            assert (f"{one}_" if changed == "renamed" else one) in str(caught.value), changed
            if changed == "renamed" and one not in OPTIONAL:
                assert f"{one}, " in str(caught.value) or f"{one} is missing" in str(caught.value)


def test_68_names_with_a_prefix(tmp_path: Path) -> None:
    """Catches a head refused for the prefix some tools write, and a second copy of a tensor that is not read (scenario 68)."""
    folder = write("original EAGLE-3, plain", tmp_path)
    before = load_head(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(folder, drop=tuple(tensors), **{f"model.{name}": tensor for name, tensor in tensors.items()})
    assert all(torch.equal(before[name], tensor) for name, tensor in load_head(folder).state_dict().items())
    edit_tensors(folder, **{"fc.weight": tensors["fc.weight"]})
    with pytest.raises(HeadError, match=r"model\.fc\.weight.* are the same tensor of an EAGLE-3 head|fc\.weight and model\.fc"):
        load_head(folder)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


FLAGS = [
    ({"residual_scale": 0.5}, "residual_scale=0.5 is unknown and may change what the head computes"),
    ({"qk_norm": True}, "qk_norm=True is unknown"),
    ({"eagle_config": {"extra_layernorm": True}}, r"eagle_config\.extra_layernorm=True is unknown"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ({"logit_scale": 0.25}, "logit_scale=0.25 is not supported"),
    ({"sliding_window": 64}, "sliding_window=64 is not supported"),
    ({"layer_types": ["sliding_attention"]}, "layer_types names 'sliding_attention'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.* is unknown"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, r"eagle_config\.use_mtp_layernorm=True is not supported"),
]


@pytest.mark.parametrize("case", ["original EAGLE-1, plain", "original EAGLE-3, plain", "speculators EAGLE-3, plain"])
@pytest.mark.parametrize(("changes", "message"), FLAGS)
def test_69_a_flag_nobody_knows_is_named(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Catches a head computed otherwise than it was trained, which only acceptance would show (scenario 69)."""
    edit(write(case, tmp_path), **changes)
    with pytest.raises(HeadError, match=message):
        load_head(tmp_path)


def test_69_flags_that_are_off_or_say_nothing_pass(tmp_path: Path) -> None:
    """Catches released heads refused for what every configuration carries (scenario 69)."""
    folder = write("original EAGLE-3, plain", tmp_path)
    edit(folder, attention_dropout=0.0, qk_norm=False, residual_scale=None, use_cache=True, torch_dtype="float16", my_note="x")
    edit(folder, sliding_window=4096, use_sliding_window=False, max_window_layers=28, layer_types=["full_attention"])
    edit(folder, eagle_config={"use_aux_hidden_state": True, "use_last_layernorm": True, "parallel_draft_step": 1})
    edit(folder, pretraining_tp=1, initializer_range=0.02, bos_token_id=1, rope_scaling=None, id2label={"0": "A"})
    load_head(folder)


def test_70_a_missing_norm_before_residual_follows_the_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches the other default, which vLLM takes, and a reader who is not told (scenarios 69 and 70)."""
    folder = write("speculators EAGLE-3, plain", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    del raw["norm_before_residual"], raw["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(raw))
    for _ in range(2):
        assert load_head(folder).config.norm_before_residual is False
    assert load_head(folder).config.states_read(32) == (2, 16, 29)
    assert sum("does not say norm_before_residual" in record.message for record in caplog.records) == 1
    load_head(write("original EAGLE-3, plain", tmp_path / "original"))
    assert len(caplog.records) == 1  # an original head that is silent means no


def test_70_old_names_say_what_no_flag_says(tmp_path: Path) -> None:
    """Catches a head of an old release refused, or its norms left out: it has the tensors and no flag (scenarios 69 and 70)."""
    folder = write("original EAGLE-3, fc_norm", tmp_path)
    wanted, tensors = load_head(folder), load_file(folder / "model.safetensors")
    old = {f"aux_norm_{part}.weight": tensors[f"fc_norm.{i}.weight"] for i, part in enumerate(("low", "mid", "high"))}
    edit_tensors(folder, drop=tuple(f"fc_norm.{i}.weight" for i in range(3)), **old)
    raw = json.loads((folder / "config.json").read_text())
    del raw["fc_norm"]
    (folder / "config.json").write_text(json.dumps(raw))
    found = load_head(folder)
    assert found.config == wanted.config
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.state_dict().items())
    edit_tensors(folder, drop=("aux_norm_mid.weight",))
    with pytest.raises(HeadError, match=r"tensor fc_norm\.1\.weight is missing"):
        load_head(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "a setting has a value of the wrong type"),
        ({"rope_scaling": [1]}, "a setting has a value of the wrong type"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "settings of the head are not complete .*factor",
        ),
        ({"intermediate_size": 40}, r"gate_proj\.weight has shape .*; .*up_proj\.weight has shape .*; .*down_proj\.weight has"),
    ],
)
def test_68_settings_of_another_type(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Catches a traceback from deep inside where a line would do (scenario 68)."""
    edit(write("original EAGLE-3, plain", tmp_path), **changes)
    with pytest.raises(HeadError, match=message):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(HeadError, match="is not an object of settings"):
        check_folder(tmp_path)


def test_68_no_tensor_of_a_layout_is_left_out(tmp_path: Path) -> None:
    """Catches a variant whose tensors nobody takes away: the cases above stand for all (scenario 68)."""
    tried, there = set(), set()
    for number, name in enumerate(CASES):
        tensors = load_file(write(name, tmp_path / str(number)) / "model.safetensors")
        there |= {(name.partition(",")[0], tensor) for tensor in tensors}
        tried |= {(name.partition(",")[0], tensor) for tensor in tensors if name in EVERY_TENSOR}
    assert there == tried

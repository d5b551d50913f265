"""Targets that are not float32: equal to plain decoding, different at ties alone, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase

from tests.integration.harness import counters, drafting, engine, generate, greedy, prompts, runner_of
from vllm_eagle import EagleError, speculate
from vllm_eagle.heads import load_head, save_head
from vllm_eagle.testing import Half, tiny_head, tiny_target
from vllm_eagle.train.target import Target

ASKED = prompts([5, 120, 33, 90, 64, 7])
TOKENS = 40
GREEDY = [greedy(TOKENS)] * len(ASKED)
SEEDED = [SamplingParams(temperature=0.9, seed=r, max_tokens=TOKENS, ignore_eos=True) for r in range(len(ASKED))]


def compared(
    target: str, head: str, params: list[SamplingParams], **options: Any
) -> tuple[list[list[int]], list[list[int]], LLM]:
    """Return what plain decoding writes and what trees do, with a drafter that is right at a depth that changes."""
    want = generate(engine(target, max_num_seqs=6, **options), ASKED, params)
    tree = engine(target, max_num_seqs=6, **options, **speculate(head, tree_size=20, tree_depth=4, tree_top_k=4))
    usual, texts = runner_of(tree).drafter.drafter, [prompt + out for prompt, out in zip(ASKED, want, strict=True)]
    shape: dict[str, Any] = {"texts": texts, "depth": 4, "width": 3, "sibling": 2, "right_depth": [4, 2, 0, 3]}
    with drafting(tree, Half(usual, usual.growth, **shape)):
        got = generate(tree, ASKED, params)
    assert counters(tree)["accepted_tokens"] > 60
    return want, got, tree


@pytest.fixture
def calm(tmp_path: Path) -> str:
    """A target whose layers add little: one that tosses its features about makes every rounding large."""
    return tiny_target(tmp_path / "target", damping=0.02)


def gaps(target: str, dtype: torch.dtype, wants: list[list[int]], gots: list[list[int]]) -> list[float]:
    """Return how far behind the best token the worse one stands where two texts part, in float32 after their common prefix."""
    exact, found = Target.load(Path(target), dtype=dtype), []
    exact.model.float()
    for prompt, want, got in zip(ASKED, wants, gots, strict=True):
        if want != got:
            at = next(i for i in range(TOKENS) if want[i] != got[i])
            logits = exact.logits(exact.features([prompt + want[:at]])[0][-1:])[0]
            found.append(float(logits.max() - logits[[want[at], got[at]]].min()))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_at_ties_alone(calm: str, tmp_path: Path, dtype: torch.dtype) -> None:
    """Catches a tree whose rows see other keys, hidden behind the rounding of 16 bits; the head is kept in another dtype.

    The best logits here are about 16: eight units in their last place are what two ways to add may differ by.
    """
    head = tiny_head(tmp_path / "head")  # float32
    want, got, tree = compared(calm, head, GREEDY, dtype=str(dtype).removeprefix("torch."))
    assert {parameter.dtype for parameter in runner_of(tree).drafter.head.parameters()} == {dtype}
    assert all(gap < 8 * 16 * torch.finfo(dtype).eps / 2 for gap in gaps(calm, dtype, want, got))
    together = sum(next((i for i in range(TOKENS) if w[i] != g[i]), TOKENS) for w, g in zip(want, got, strict=True))
    assert together > 0.2 * TOKENS * len(ASKED)


def test_a_head_of_half_precision_on_a_float32_target(target: str, tmp_path: Path) -> None:
    """Catches a head that drags its dtype into the target's arithmetic, or fails to multiply with it."""
    head = load_head(tiny_head(tmp_path / "head"))
    save_head(head, tmp_path / "half", torch.bfloat16)
    want, got, _ = compared(target, str(tmp_path / "half"), GREEDY)
    assert got == want


def eight_bits(target: str, **changes: Any) -> str:
    """Round a target's layers to 8 bits, a scale for each row, in the layout of compressed-tensors."""
    file, config = Path(target) / "model.safetensors", Path(target) / "config.json"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights |= {name: (weights[name] / scale).round().to(torch.int8), f"{name}_scale": scale}
    save_file(weights, file, metadata={"format": "pt"})
    eight: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False} | changes,
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": scheme}))
    return target


def test_63_a_quantized_target_with_a_plain_head(tmp_path: Path) -> None:
    """Catches a head loaded with its target's quantization, and rows of a tree quantized together (scenario 63)."""
    target = eight_bits(tiny_target(tmp_path / "target"))
    head = tiny_head(tmp_path / "head")
    want, got, tree = compared(target, head, GREEDY)
    assert got == want
    assert "Int8" in type(runner_of(tree).model.model.layers[0].self_attn.qkv_proj.scheme).__name__
    mine = runner_of(tree).drafter.head
    assert not any(isinstance(part, LinearBase | nn.Linear) for part in mine.modules())  # packed by us, from plain weights
    plain = load_head(head)
    for name, weight in mine.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name])
    want, got, _ = compared(target, head, SEEDED)
    assert got == want


def configure(model: str, head: str, **options: Any) -> Any:
    return EngineArgs(model=model, max_model_len=512, **speculate(head), **options).create_engine_config()


def test_63_other_quantized_targets_are_refused(tmp_path: Path, head: str) -> None:
    """Catches a scheme, or a dtype beside it, that nobody compared with plain decoding (scenario 63)."""
    target = eight_bits(tiny_target(tmp_path / "target"))
    with pytest.raises(
        EagleError, match=r"is quantized: trees are exact in float32 alone, not in torch\.bfloat16; use --dtype float32"
    ):
        configure(target, head, dtype="bfloat16")
    four = eight_bits(tiny_target(tmp_path / "four"), num_bits=4)
    with pytest.raises(EagleError, match=r"is quantized \(compressed-tensors\); supported: .* \(W8A8\)"):
        configure(four, head, dtype="float32")


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "bfloat16"])
def test_65_another_dtype_of_keys_and_values(target: str, head: str, dtype: str) -> None:
    """Catches pages of K/V that tree attention reads as what they are not (scenario 65)."""
    with pytest.raises(EagleError, match="--kv-cache-dtype is not supported together with trees; remove it"):
        configure(target, head, dtype="float32", kv_cache_dtype=dtype)

"""Every variant of a head, in every layout that has a place for it: small, with norms, biases and maps that do something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_eagle.heads import AnyHead, Eagle3Head, HeadConfig, new_head, save_head, save_speculators

VERIFIER = {"name_or_path": "toy", "architectures": ["LlamaForCausalLM"]}
ONE = HeadConfig(32, 48, 1, 4, 2, 8, 96, 1e-5, 256, fusion_bias=True, qkv_bias=False)
THREE = replace(ONE, fusion_bias=False, draft_vocab_size=40, aux_layers=(1, 2, 4))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

EAGLE1: Mapping[str, HeadConfig] = {
    "plain": ONE,
    "no fusion bias": replace(ONE, fusion_bias=False),
    "biases": replace(ONE, qkv_bias=True, o_bias=True),
    "embedding": replace(ONE, own_embedding=True),
    "llama3": replace(ONE, rope=LLAMA3),
}
EAGLE3: Mapping[str, HeadConfig] = {
    "plain": THREE,
    "norm_before_residual": replace(THREE, norm_before_residual=True),
    "norm_output": replace(THREE, norm_output=True),
    "norm_before_fc": replace(THREE, norm_before_fc=True),
    "fc_norm": replace(THREE, fc_norm=True),
    "embedding": replace(THREE, own_embedding=True),
    "wider target": replace(THREE, target_hidden_size=56, own_embedding=True),
    "two layers": replace(THREE, num_layers=2),
    "biases": replace(THREE, qkv_bias=True, o_bias=True),
    "whole vocabulary": replace(THREE, draft_vocab_size=96),
    "two states": replace(THREE, num_aux=2, aux_layers=(1, 4)),
    "llama3": replace(THREE, rope=LLAMA3),
    "together": replace(
        THREE,
        **{"norm_before_residual": True, "norm_output": True, "fc_norm": True, "target_hidden_size": 56},
        own_embedding=True,
        num_layers=2,
    ),
}
CASES: Mapping[str, tuple[str, HeadConfig]] = {
    **{f"original EAGLE-1, {name}": ("original", config) for name, config in EAGLE1.items()},
    "original EAGLE-1, qkv_bias": ("original", replace(ONE, qkv_bias=True)),
    "original EAGLE-1, two layers": ("original", replace(ONE, num_layers=2)),
    **{f"speculators EAGLE-1, {name}": ("speculators", config) for name, config in EAGLE1.items()},
    "speculators EAGLE-1, layernorms": ("speculators", replace(ONE, layernorms=True)),
    **{f"original EAGLE-3, {name}": ("original", config) for name, config in EAGLE3.items()},
    "original EAGLE-3, fusion bias": ("original", replace(THREE, fusion_bias=True)),
    "original EAGLE-3, qkv_bias": ("original", replace(THREE, qkv_bias=True)),
    **{f"speculators EAGLE-3, {name}": ("speculators", config) for name, config in EAGLE3.items()},
}
"""Layout and configuration by name."""


def random_head(config: HeadConfig, seed: int = 0) -> AnyHead:
    """Return a head every tensor of which matters: norms around one, biases, and a map without a pattern."""
    torch.manual_seed(seed)
    head = new_head(config)
    for name, weight in head.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
        else:
            torch.nn.init.uniform_(weight, 0.3, 1.7)
    if isinstance(head, Eagle3Head):
        head.set_vocabulary(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return head.eval().requires_grad_(False)


def write(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the head of a case and return its folder."""
    layout, config = CASES[name]
    head = random_head(config)
    if layout == "original":
        save_head(head, folder, dtype)
    else:
        save_speculators(head, folder, VERIFIER, dtype)
    if config.draft_vocab_size == config.vocab_size:
        edit_tensors(folder, drop=("d2t", "t2d"))
    return folder


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """Rewrite the tensors of a folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if name not in drop}, path, metadata={"format": "pt"})

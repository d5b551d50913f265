"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW


def build(head: nn.Module, learning_rate: float, weight_decay: float) -> AdamW:
    """Return AdamW with betas (0.9, 0.95), as in the EAGLE papers; norms do not decay."""
    matrices = [weight for weight in head.parameters() if weight.dim() == 2]
    others = [weight for weight in head.parameters() if weight.dim() != 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def set_rate(optimizer: AdamW, rate: float) -> None:
    """Set every group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def cosine(step: int, steps: int, warmup: int, floor: float = 0.02) -> float:
    """Return the share of the highest rate at `step`: linear warm-up, then half a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

"""The processes that fit one head together: `torchrun` starts them, one process is a team of one.

Gradients are added up, not averaged: each batch's loss already has its share of the whole step, so a step is the same
however its batches are dealt out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm_eagle.errors import EagleError

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Team:
    """Know who takes part; every process holds the same head after every step."""

    size: int
    number: int
    device: torch.device
    _reduce: Callable[..., Any]
    _broadcast: Callable[..., Any]
    _state: Any

    @classmethod
    def gather(cls, device: str) -> Team:
        """Meet the other processes, each on a `device` of its own ("cpu" or "cuda"); raises `EagleError`."""
        try:
            from accelerate import PartialState
            from accelerate.utils import broadcast, reduce
        except ImportError:
            raise EagleError("a fit needs the package accelerate; pip install 'vllm_eagle[train]'") from None
        state = PartialState(cpu=device == "cpu")
        own = state.device if device == "cuda" else torch.device(device)
        return cls(state.num_processes, state.process_index, own, reduce, broadcast, state)

    @property
    def leads(self) -> bool:
        """Tell whether this process writes files and the journal."""
        return self.number == 0

    @torch.no_grad()
    def share_state(self, module: nn.Module) -> None:
        """Give every process the weights and buffers of process 0."""
        for tensor in module.state_dict().values():
            tensor.copy_(self._broadcast(tensor))

    def add_gradients(self, module: nn.Module) -> None:
        """Replace every gradient by its sum over the processes."""
        if self.size == 1:
            return
        for weight in module.parameters():
            gradient: Tensor = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = self._reduce(gradient, "sum")

    def wait(self) -> None:
        """Return when every process is here."""
        self._state.wait_for_everyone()

    def part(self) -> None:
        """End the work together; one process has no group, and an engine beside it may have one of its own."""
        if self.size > 1:
            self._state.destroy_process_group()

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """Return the context of a forward pass in `precision`; weights, softmax and losses stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")

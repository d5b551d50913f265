"""What servers of these tests load by name: a target that writes what it is told, and a drafter as deep as it is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_eagle.testing import Half
from vllm_eagle.tree import DraftTree

ZERO = 19
"""Token of "0" in the tiny target with letters."""


class Script(AdapterLogitsProcessor):
    """Make the target write the ids a request brings along as `script`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        script = (params.extra_args or {}).get("script")
        if not script:
            return None

        def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) < len(script):
                logits[int(script[len(output)])] += 1000.0
            return logits

        return force


class Told(Half):
    """Be right down to the depth that the text begins with, one digit; all the way down without a digit."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, right_depth=0, **options)

    def _tree(self, history: NDArray[np.int32]) -> DraftTree:
        digit = int(history[0]) - ZERO
        self.cycle = [digit if 0 <= digit <= 9 else self.depth]
        return super()._tree(history)

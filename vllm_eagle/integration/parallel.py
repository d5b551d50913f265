"""Tensor parallel: every rank verifies and drafts for itself, and all of them do the same.

What a rank decides by must be equal on all of them, to the bit where ranks wait for each other:

    logits            gathered, the head's like the target's: each rank multiplies with its share of the rows
    trees             the first rank's: the scheduler sends their structure with the schedule, which every rank gets anyway
    times of steps    the first rank's: they leave with its output and return with the next schedule (`AgreedCosts`)
    times at start    the first rank's, sent once

So no step has a message of its own. The head's layers are small and stand on every rank.
Shapes: `n` rows, `D` hidden, `S` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.nn import functional
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_eagle.control import Costs, Curve

T = TypeVar("T")
Linear = Callable[[Tensor], Tensor]
Seen = list[tuple[str, int, float]]
"""What a step took: the name of a curve, or "rest", rows, and seconds; or "drafted" or "plain", requests, and a share of what
was expected."""


def ranks() -> int:
    """Return how many processes share the target's layers."""
    return get_tensor_model_parallel_world_size() if model_parallel_is_initialized() else 1


def is_first() -> bool:
    """Tell whether this is the rank whose output the engine takes."""
    return ranks() == 1 or get_tensor_model_parallel_rank() == 0


def agreed(value: T) -> T:
    """Return the first rank's value on every rank; for start-up, since all wait for it."""
    return value if ranks() == 1 else get_tp_group().broadcast_object(value if is_first() else None)  # type: ignore[no-any-return]


def rows_of(table: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
    """Return the weights [S, D] of some tokens, on every rank all of them, though each holds a part of the table."""
    if ranks() == 1:
        return table.weight[tokens]
    first, end = table.shard_indices.org_vocab_start_index, table.shard_indices.org_vocab_end_index
    here = (tokens >= first) & (tokens < end)
    rows = table.weight.new_zeros(len(tokens), table.weight.shape[1])
    rows[here] = table.weight[tokens[here] - first]
    return tensor_model_parallel_all_reduce(rows)


def shared_product(rows: Tensor, make: Callable[[Tensor], Linear]) -> Linear:
    """Return x [n, D] -> x W^T [n, S] for W [S, D], equal on every rank: each makes a product of its share of the rows."""
    if ranks() == 1:
        return make(rows)
    size = len(rows)
    share = -(-size // ranks())
    mine = rows[get_tensor_model_parallel_rank() * share :][:share]
    product = make(functional.pad(mine, (0, 0, 0, share - len(mine))).contiguous())
    return lambda x: tensor_model_parallel_all_gather(product(x))[:, :size]


def plain_product(table: VocabParallelEmbedding, size: int) -> Linear:
    """Return x [n, D] -> x W^T [n, size] for the whole table, without what the target does to its logits."""
    if ranks() == 1:
        return lambda x: functional.linear(x, table.weight[:size])
    return lambda x: tensor_model_parallel_all_gather(functional.linear(x, table.weight))[:, :size]


class _Told(Curve):
    """Write down what is observed instead of taking it."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], name: str, seen: Seen) -> None:
        super().__init__(rows, seconds)
        self._name, self._seen = name, seen

    def observe(self, rows: int, seconds: float) -> None:
        """See `Curve.observe`."""
        self._seen.append((self._name, rows, seconds))

    def take(self, rows: int, seconds: float) -> None:
        """Learn what the first rank observed."""
        super().observe(rows, seconds)


class AgreedCosts(Costs):
    """Costs that are equal on every rank: each takes what the first one saw, at the same point between two steps."""

    def __init__(self, rows: Sequence[int], verify: Sequence[float], level: Sequence[float]) -> None:
        """`rows` and seconds as measured at start-up, the first rank's."""
        self.seen: Seen = []
        parts = {"verify": verify, "first": level, "level": level}
        self._curves = {name: _Told(rows, seconds, name, self.seen) for name, seconds in parts.items()}
        super().__init__(**self._curves)

    def observe_rest(self, seconds: float) -> None:
        """See `Costs.observe_rest`."""
        self.seen.append(("rest", 0, seconds))

    def observe_cycle(self, drafted: bool, requests: int, ratio: float) -> None:
        """See `Costs.observe_cycle`."""
        self.seen.append(("drafted" if drafted else "plain", requests, ratio))

    def leave(self) -> Seen:
        """Return what this rank saw since the last call; only the first rank's is sent."""
        seen = list(self.seen)
        self.seen.clear()
        return seen

    def take(self, seen: Seen) -> None:
        """Learn what the first rank saw."""
        for name, rows, seconds in seen:
            if name == "rest":
                super().observe_rest(seconds)
            elif name in ("drafted", "plain"):
                super().observe_cycle(name == "drafted", rows, seconds)
            else:
                self._curves[name].take(rows, seconds)


def share_costs(rows: Sequence[int], verify: Sequence[float], level: Sequence[float]) -> Costs:
    """Return costs that learn at once where there is one rank, and in agreement where there are several."""
    if ranks() > 1:
        return AgreedCosts(rows, verify, level)
    return Costs(Curve(rows, verify), Curve(rows, level), Curve(rows, level))

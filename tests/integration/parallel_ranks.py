"""What tests run inside the workers of a tensor-parallel engine, by `collective_rpc`."""

from __future__ import annotations

import functools
import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed import get_tensor_model_parallel_rank

from vllm_eagle.integration import pace
from vllm_eagle.integration.gemm import packed_linear
from vllm_eagle.integration.parallel import plain_product, rows_of, shared_product


def watch(worker: Any) -> None:
    """Record every step's trees and accepted paths from now on; every rank but the first sees a clock that is wrong.

    One step in three drafts, whether it pays on this machine or not.
    """
    runner, usual = worker.model_runner, worker.model_runner._sample
    runner.told = []
    asked, pays = count(), runner._pace.controller.worthwhile

    def worthwhile(*args: int) -> bool:
        return bool(pays(*args)) | (next(asked) % 3 == 0)

    runner._pace.controller.worthwhile = worthwhile

    @functools.wraps(usual)
    def sample(*args: Any, **kwargs: Any) -> Any:
        step = runner._step
        out = usual(*args, **kwargs)
        trees = [None if tree is None else (tree.nodes, tree.parents.tolist()) for tree in step.trees]
        runner.told.append((trees, step.walk.paths, step.walk.emitted))
        return out

    runner._sample = sample
    if get_tensor_model_parallel_rank() > 0:
        calls = count()

        def clock() -> float:
            return 50 * time.perf_counter() + next(calls) % 7

        pace.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
        runner._pace.controller.clock = clock


def told(worker: Any) -> tuple[list[Any], Any]:
    """Return what was recorded since the last call, and what the controller has learnt."""
    runner = worker.model_runner
    found, controller = list(runner.told), runner._pace.controller
    runner.told.clear()
    costs = controller.costs
    curves = [curve.points() for curve in (costs.verify, costs.first, costs.level)]
    return found, (curves, costs.rest, controller.calibration._tried.tolist(), controller._gains.tolist())


def embedding(worker: Any) -> tuple[str, int]:
    """Say whose embedding the head uses, and how many rows this rank holds of the target's."""
    proposer, target = worker.model_runner.drafter, worker.model_runner.model.model.embed_tokens
    shared = proposer.drafter.embed is target and proposer.head.embed_tokens is None
    own = proposer.drafter.embed is proposer.head.embed_tokens
    return {(True, False): "target's", (False, True): "own"}[shared, own], len(target.weight)


def products(worker: Any, weights: str) -> tuple[float, list[bytes]]:
    """Compare products whose rows the ranks share with the whole: the largest error, and the bits this rank got."""
    target = worker.model_runner.model
    table = load_file(weights)["lm_head.weight"]
    tokens = torch.arange(0, 256, 5)[:51]  # no even number, in both halves
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows_of(target.lm_head, tokens), table[tokens])
    got = [shared_product(table[tokens], packed_linear)(x), plain_product(target.lm_head, 250)(x), target.compute_logits(x)]
    wanted = [x @ table[tokens].T, x @ table[:250].T, x @ table.T]
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)), [a.numpy().tobytes() for a in got]


def watch_head(worker: Any) -> None:
    """Record the trees that the head behind a double drafts from now on."""
    runner = worker.model_runner
    head = runner.drafter.drafter.inner
    usual, runner.told = head.draft, []

    def draft(*args: Any) -> Any:
        trees = usual(*args)
        runner.told += [(tree.nodes, tree.parents.tolist(), tree.guesses.tolist()) for tree in trees if tree.size]
        return trees

    head.draft = draft


def drafted(worker: Any) -> tuple[list[Any], bool]:
    """Return the trees recorded, and whether this rank has seen another's verified."""
    return worker.model_runner.told, worker.model_runner._warned

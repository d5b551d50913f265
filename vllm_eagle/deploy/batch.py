"""A batch job on a Ray cluster: Ray Data hands blocks of rows to replicas, the results come back to this process's journal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_eagle.batch.results import Results
from vllm_eagle.errors import EagleError, last_error
from vllm_eagle.train.progress import Progress

LOCAL = "local"


@dataclass(frozen=True)
class Cluster:
    """Say where the replicas run, and how many rows each holds."""

    address: str = LOCAL
    """`local` starts a cluster on this machine for the length of the job; `auto`, HOST:PORT or ray://HOST:PORT join one."""
    replicas: int = 1
    cpus: int = 1
    """Of each replica: what Ray sets aside, and its number of threads."""
    block: int = 256
    """Rows a replica takes at a time; a kill costs at most those in hand."""


def answer(cluster: Cluster, flags: list[str], rows: Iterator[tuple[int, bytes]], total: int, results: Results) -> None:
    """Answer all rows that have no result yet; raises `EagleError` if Ray is missing, or with the reason no replica starts."""
    progress = Progress("rows", total, len(results.places))
    todo = [{"index": index, "line": line} for index, line in rows if index not in results.places]
    failed = 0
    with connected(cluster) as data:
        for found in _answered(data, todo, cluster, flags):
            if found["index"] in results.places:  # of a block that was begun again
                continue
            result = json.loads(found["result"])
            results.add(found["index"], result)
            failed += "error" in result
            tokens = sum(one["tokens"] for one in result.get("outputs", ()))
            progress.add(tokens, note=f" · {failed} failed" if failed else "")


class Answerer:
    """Answer blocks of rows with an engine of its own: what Ray Data runs, once on every replica."""

    def __init__(self, flags: list[str]) -> None:
        """Start the engine; raises `EagleError` for flags vLLM does not take."""
        from vllm_eagle.integration.batch_engine import engine

        self._llm = engine(flags)

    def __call__(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of a block, as JSON, in the order they ended."""
        from vllm_eagle.integration.batch_engine import answers

        rows = zip(map(int, block["index"]), block["line"], strict=True)
        found = list(answers(self._llm, rows))
        return {"index": [index for index, _ in found], "result": [json.dumps(result) for _, result in found]}


def _answered(data: Any, todo: Sequence[dict[str, Any]], cluster: Cluster, flags: list[str]) -> Iterator[dict[str, Any]]:
    from ray.exceptions import RayError

    blocks = -(-len(todo) // cluster.block)
    answered = data.from_items(todo, override_num_blocks=blocks).map_batches(
        Answerer,
        fn_constructor_args=(flags,),
        batch_size=cluster.block,
        compute=data.ActorPoolStrategy(size=cluster.replicas),
        num_cpus=cluster.cpus,
        runtime_env={"env_vars": _environment(cluster)},
    )
    try:
        yield from answered.iter_rows()
    except RayError as wrong:
        raise EagleError(
            f"no replica could go on: {last_error(str(wrong))}; answered rows are kept, run the same command again"
        ) from None


@contextmanager
def connected(cluster: Cluster) -> Iterator[Any]:
    """Start or join the cluster and leave it at the end; yields `ray.data`."""
    try:
        import ray
        from ray import data
    except ImportError as wrong:
        raise EagleError(f"Ray is missing ({wrong}); pip install 'vllm-eagle[ray]'") from None
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if cluster.address == LOCAL:
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own default gives way to everything else on the machine
        options |= {"num_cpus": cluster.replicas * cluster.cpus, "include_dashboard": False}
    try:
        ray.init(address=cluster.address, **options)
    except (ConnectionError, ValueError) as wrong:
        raise EagleError(f"--ray {cluster.address}: {last_error(str(wrong))}") from None
    try:
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        yield data
    finally:
        ray.shutdown()


def _environment(cluster: Cluster) -> dict[str, str]:
    """Hand our settings on, and keep the replicas of one machine off each other's cores."""
    own = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "LD_PRELOAD"))}
    threads = os.environ.get("OMP_NUM_THREADS") or str(cluster.cpus)
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads} | own

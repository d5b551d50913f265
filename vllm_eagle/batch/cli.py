"""The command `vllm-eagle batch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_eagle.batch.results import Results, fingerprint
from vllm_eagle.batch.rows import count, lines

_ABOUT = """\
Answer every row of a .jsonl file with vLLM and trees: a progress bar, the batch always full, and after a kill the same
command goes on where it stopped. A row is an object with "prompt" (text or token ids) or "messages", an "id" if you
like, and any of vLLM's sampling parameters under their own names. Results come in the rows' order, each with its index,
id and outputs; a row that cannot be answered gets an "error", and the rest goes on.

Every other flag is vLLM's, as for vllm serve: --model, --speculative-model, --max-num-seqs, ...

  example: vllm-eagle batch in.jsonl out.jsonl --model MODEL --speculative-model HEAD
  on Ray:  vllm-eagle batch in.jsonl out.jsonl --ray auto --ray-replicas 4 --model MODEL --speculative-model HEAD
  a row:   {"id": 7, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 200, "seed": 1}
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `batch`."""
    command = subparsers.add_parser(
        "batch",
        help="answer a file of prompts, resumable, in order",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("rows", type=Path, metavar="IN.jsonl", help="a request in each line")
    command.add_argument("out", type=Path, metavar="OUT.jsonl", help="their results, in the same order")
    command.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="answer on replicas of a Ray cluster: auto, HOST:PORT, ray://HOST:PORT, or one started here for the job",
    )
    command.add_argument("--ray-replicas", type=int, default=1, metavar="N", help="engines (default: %(default)s)")
    command.add_argument("--ray-cpus", type=int, default=1, metavar="N", help="CPUs of each engine (default: %(default)s)")
    command.add_argument(
        "--ray-block", type=int, default=256, metavar="N", help="rows an engine takes at a time (default: %(default)s)"
    )
    command.set_defaults(run=_run, passes_on="flags")


def _run(arguments: argparse.Namespace) -> int:
    from vllm_eagle.demo.cli import prepare_process

    total = count(arguments.rows)
    prepare_process()
    with Results(arguments.out, fingerprint(arguments.rows, arguments.flags)) as results:
        if len(results.places) < total:
            _answer(arguments, total, results)
        results.finish(total)
    print(f"{total} rows in {arguments.out}")
    return 0


def _answer(arguments: argparse.Namespace, total: int, results: Results) -> None:
    if arguments.ray is not None:
        from vllm_eagle.deploy.batch import Cluster
        from vllm_eagle.deploy.batch import answer as answer_on_ray

        cluster = Cluster(arguments.ray, arguments.ray_replicas, arguments.ray_cpus, arguments.ray_block)
        answer_on_ray(cluster, arguments.flags, lines(arguments.rows), total, results)
    else:
        from vllm_eagle.integration.batch_engine import answer

        answer(arguments.flags, lines(arguments.rows), total, results)

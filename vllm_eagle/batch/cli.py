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
    command.set_defaults(run=_run, passes_on="flags")


def _run(arguments: argparse.Namespace) -> int:
    from vllm_eagle.demo.cli import prepare_process

    total = count(arguments.rows)
    prepare_process()
    with Results(arguments.out, fingerprint(arguments.rows, arguments.flags)) as results:
        if len(results.places) < total:
            from vllm_eagle.integration.batch_engine import answer

            answer(arguments.flags, lines(arguments.rows), total, results)
        results.finish(total)
    print(f"{total} rows in {arguments.out}")
    return 0

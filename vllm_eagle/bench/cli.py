"""The command `vllm-eagle bench`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_eagle.arguments import head_folder
from vllm_eagle.bench.contestants import AUTO, KNOWN, Contestant, parse_all
from vllm_eagle.errors import EagleError

if TYPE_CHECKING:
    from vllm_eagle.bench.child import Settings
    from vllm_eagle.bench.machine import Model
    from vllm_eagle.bench.rounds import Plan
    from vllm_eagle.bench.workloads import Workload

_ABOUT = f"""\
Measure tokens per second of several ways to decode the same prompts on this machine. Each contestant has a process of
its own; in every round each is measured once, in an order that turns, so that a machine that gets slower is slower for
all. Ratios are to plain vLLM in the same round; text equality is counted along the way. Leave the machine alone meanwhile.

Without options it measures SmolLM2-135M-Instruct and the head that comes with the repository on the demo's prompts:
about 25 minutes on 2 cores. A run that was killed goes on when it is started again with the same options.

contestants:
{chr(10).join(f"  {name:10} {what}" for name, what in KNOWN.items())}

  example: vllm-eagle bench --model MODEL --head HEAD --prompts mt_bench.jsonl spec_bench.jsonl:qa HumanEval.jsonl.gz
             --contestants auto tree:8 tree:25 chain:1 chain:2 chain:3 ngram hf --concurrency 1 4 16 --temperatures 0 1
  a look in a minute or two: vllm-eagle bench --contestants auto --count 2 --tokens 16 --rounds 1 --concurrency 1
"""
_DEFAULT = ["plain", "auto", "tree:8", "tree:25", "chain:3", "ngram", "hf"]
_MARGIN = 128
"""Tokens of room behind the longest answer, so that trees are not cut at the length limit."""
_ENGINE = 1 << 30
"""Bytes a process takes beside weights and cache."""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `bench`."""
    cmd = subparsers.add_parser(
        "bench",
        help="compare ways to decode: tokens per second, latency, accepted length, text equality",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cmd.add_argument("--model", type=Path, help="folder of the target (default: SmolLM2-135M-Instruct, prepared on first use)")
    cmd.add_argument(
        "--head",
        type=head_folder,
        help="its EAGLE head, also OWNER/NAME (default, without --model: in examples/heads)",
    )
    cmd.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE[:CATEGORY]",
        help="workloads: .jsonl or .jsonl.gz with a field turns (its first turn), prompt or text (default: the demo's prompts)",
    )
    cmd.add_argument("--contestants", nargs="+", default=_DEFAULT, metavar="NAME", help=f"(default: {' '.join(_DEFAULT)})")
    cmd.add_argument(
        "--concurrency", type=_positive, nargs="+", default=[1, 4, 8], metavar="N", help="requests at once (default: 1 4 8)"
    )
    cmd.add_argument("--temperatures", type=_temperature, nargs="+", default=[0.0], metavar="T", help="(default: 0, greedy)")
    cmd.add_argument(
        "--count", type=_positive, default=8, metavar="N", help="prompts of a workload, if not more at once (default: 8)"
    )
    cmd.add_argument("--tokens", type=_positive, default=64, metavar="N", help="longest answer (default: %(default)s)")
    cmd.add_argument("--rounds", type=_positive, default=3, metavar="N", help="(default: %(default)s)")
    cmd.add_argument(
        "--floor",
        type=_share,
        metavar="SHARE",
        help="end with status 1 if auto reaches less than this share of the fastest choice of size anywhere, as in 0.95",
    )
    cmd.add_argument("--max-prompt-tokens", type=_positive, default=1024, metavar="N", help="longer prompts are passed over")
    cmd.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    cmd.add_argument("--compiled", action="store_true", help="vLLM's compiled mode instead of eager (starts slowly)")
    cmd.add_argument("--threads", type=_positive, metavar="N", help="of a contestant (default: OMP_NUM_THREADS, or all cores)")
    cmd.add_argument(
        "--resident", type=_positive, metavar="N", help="processes kept at once; others restart (default: what memory holds)"
    )
    cmd.add_argument("--out", type=Path, default=Path("bench-results"), metavar="FOLDER", help="(default: %(default)s)")
    cmd.set_defaults(run=_run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 or more")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r}: want a temperature from 0 to 10")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a share above 0 and up to 1")
    return value


def _run(args: argparse.Namespace) -> int:
    if args.head is not None and args.model is None:
        raise EagleError("--head without --model: name the target it was trained for")
    contestants = parse_all(args.contestants, head=args.head is not None or args.model is None)
    if args.floor and AUTO not in {one.name for one in contestants}:
        raise EagleError(f"--floor is for {AUTO}; name it among --contestants")
    _check_files(args)
    model, head = _models(args)
    from vllm_eagle.bench.crew import Crew, environment
    from vllm_eagle.bench.journal import Journal
    from vllm_eagle.bench.machine import Model, measure_in_process
    from vllm_eagle.bench.provenance import provenance
    from vllm_eagle.bench.rounds import Plan, race

    sizes = Model.read(model)
    plan = Plan(
        contestants,
        tuple(_workloads(args, model)),
        tuple(dict.fromkeys(args.temperatures)),
        tuple(dict.fromkeys(args.concurrency)),
        args.count,
        args.tokens,
        args.rounds,
    )
    settings = _settings(args, plan, model, head, sizes)
    resident = args.resident or _resident(len(contestants), settings, sizes)
    env = environment(args.threads or int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    run = _described(args, plan, model, head)
    origin = provenance(["vllm-eagle", *sys.argv[1:]], env)
    journal = Journal(args.out, run | {"threads": env["OMP_NUM_THREADS"], "commit": origin["commit"]})
    if journal.measurements:
        print(f"continuing: {len(journal.measurements)} measurements are in {journal.path}")
    machine = journal.machine or journal.know(measure_in_process(args.dtype, env))
    crew = Crew(lambda one: _named(settings, one, head), env, args.out / "logs", resident, _warm_up(plan))
    try:
        race(plan, crew, journal)
    finally:
        crew.end()
    return _report(args, plan, journal, {"machine": machine, "run": run, "provenance": origin}, sizes)


def _check_files(args: argparse.Namespace) -> None:
    for spec in args.prompts or ():
        if not Path(spec).is_file() and not Path(spec.rpartition(":")[0] or spec).is_file():
            raise EagleError(f"no prompts at {spec}; give a .jsonl or .jsonl.gz file, or FILE:CATEGORY")
    if args.head is not None:
        from vllm_eagle.heads.checkpoint import check_folder

        check_folder(args.head)


def _models(args: argparse.Namespace) -> tuple[Path, Path | None]:
    if args.model is not None:
        return args.model, args.head
    from vllm_eagle.demo.model import demo_head, demo_model

    return demo_model(), demo_head()


def _workloads(args: argparse.Namespace, model: Path) -> list[Workload]:
    from transformers import AutoTokenizer

    from vllm_eagle.bench.workloads import read_workload, tokenise
    from vllm_eagle.demo.prompts import PROMPTS
    from vllm_eagle.train.prompts import Prompt

    tokenizer = AutoTokenizer.from_pretrained(model)
    longest, count = args.max_prompt_tokens, max(args.count, *args.concurrency)
    if args.prompts is None:
        return [tokenise("demo", [Prompt(text, text) for text in PROMPTS], tokenizer, count, longest)]
    found = [read_workload(spec, tokenizer, count, longest) for spec in dict.fromkeys(args.prompts)]
    if len({workload.name for workload in found}) < len(found):
        raise EagleError("two workloads have one name; rename one of the prompt files")
    for workload in found:
        if workload.too_long:
            print(f"{workload.name}: {workload.too_long} prompts passed over, empty or longer than {longest} tokens")
    return found


def _settings(args: argparse.Namespace, plan: Plan, model: Path, head: Path | None, sizes: Model) -> Settings:
    from vllm_eagle.bench.child import Settings
    from vllm_eagle.bench.machine import BYTES

    longest = max(len(prompt) for workload in plan.workloads for prompt in workload.prompts)
    length, most = longest + plan.tokens + _MARGIN, max(plan.concurrency)
    a_token = (sizes.layers + 2) * sizes.cache_values * BYTES[args.dtype]  # two layers of room for a head
    cache = max(64 << 20, a_token * (length + 256) * most)
    return Settings("", str(model), None if head is None else str(head), args.dtype, args.compiled, length, most, cache)


def _named(settings: Settings, contestant: Contestant, head: Path | None) -> Settings:
    from dataclasses import replace

    return replace(settings, contestant=contestant.name, head=str(head) if contestant.needs_head else None)


def _warm_up(plan: Plan) -> Any:
    from vllm_eagle.bench.child import Job

    return Job(plan.workloads[0].prompts[: max(plan.concurrency)], min(8, plan.tokens), 0.0, max(plan.concurrency))


def _resident(contestants: int, settings: Settings, sizes: Model) -> int:
    """Return how many processes memory holds; raises `EagleError` if not even one."""
    from vllm_eagle.bench.machine import BYTES
    from vllm_eagle.bench.provenance import available_memory

    free, each = available_memory(), 2 * sizes.weights * BYTES[settings.dtype] + settings.cache_bytes + _ENGINE
    if free is None:
        return contestants
    fit = min(contestants, int(0.9 * free // each))
    if fit < 1:
        raise EagleError(
            f"a contestant needs about {each / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; end other processes, or lower"
            " --concurrency, --tokens or --max-prompt-tokens"
        )
    if fit < contestants:
        print(f"memory holds {fit} of {contestants} contestants at once: they restart in turn; name fewer to save that time")
    return fit


def _described(args: argparse.Namespace, plan: Plan, model: Path, head: Path | None) -> dict[str, Any]:
    from vllm_eagle.bench.journal import digest

    return {
        "model": model.name,
        "head": None if head is None else head.name,
        "contestants": [one.name for one in plan.contestants],
        "workloads": [workload.name for workload in plan.workloads],
        "prompts": plan.count,
        "prompts_digest": digest([workload.prompts for workload in plan.workloads]),
        "concurrency": list(plan.concurrency),
        "temperatures": list(plan.temperatures),
        "tokens": plan.tokens,
        "rounds": plan.rounds,
        "dtype": args.dtype,
        "mode": "compiled" if args.compiled else "eager",
    }


def _report(args: argparse.Namespace, plan: Plan, journal: Any, known: dict[str, Any], sizes: Model) -> int:
    from vllm_eagle.bench.machine import limit
    from vllm_eagle.bench.report import tables, title, write
    from vllm_eagle.bench.summary import losses, summarise

    names = [one.name for one in plan.contestants]
    bound = lambda concurrency: limit(known["machine"], sizes, args.dtype, concurrency)  # noqa: E731
    found = summarise(journal.measurements, journal.failed, names, bound)
    results = {"tables": found, "failed": journal.failed, **known}
    line = write(args.out, results)
    print(f"\n{tables(results)}\n\n{args.out / 'index.html'} has all of it; the same in one line:\n{line}")
    lost = losses(found, args.floor or 0.0)
    for table in lost:
        print(f"below --floor {args.floor}: {title(table)}, {table['auto_to_best']['median']}", file=sys.stderr)
    return 1 if lost else 0

"""Commands that train a head: generate, capture, fit, evaluate, and train for the way from prompts to a head."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_eagle.arguments import head_folder, read_layers
from vllm_eagle.errors import EagleError

if TYPE_CHECKING:
    from vllm_eagle.train.answers import Answer, Question
    from vllm_eagle.train.shards import Captured

_GENERATE = """\
Let the target answer prompts with vLLM. A head learns to guess what THIS model says next, so it must be trained
on the model's own answers; other people's text costs acceptance. Run it again at any time, also after a kill:
what is answered already is kept and skipped.

With --capture the features an EAGLE-1 head reads are kept as the answers are written, for a few percent of the time,
and capture has nothing left to do but what a kill took.

  example: vllm-eagle generate --model MODEL --prompts prompts.jsonl --out data/answers --capture data/features
  without prompts: vllm-eagle generate --model MODEL --self-prompt 2000 --out data/self
"""


_CAPTURE = """\
Run the target once over its answers and keep what its LM head reads. A head learns to continue these features;
they are the same in every epoch, so they are kept on disk in float16. Only new answers are captured, and the stored
features must reproduce the target's own argmax on 99.9 % of tokens, or nothing is written.

An EAGLE-3 head reads three inner layers instead: --aux-layers auto keeps their inputs, too.

  example: vllm-eagle capture --model MODEL --answers data/answers data/self --out data/features
"""


_FIT = """\
Train a head on captured features and export it. The head is run on its own outputs for several depths, because that
is how it drafts: trained for one step only it does not survive its own mistakes. A killed run continues from its last
saved state with the same result; give --start to train an exported head further on other data or settings.
The setting recipe=eagle3 trains an EAGLE-3 head, on features captured with --aux-layers auto.

  example: vllm-eagle fit --model MODEL --features data/features --settings configs/train/eagle1.toml --out heads/mine
"""


_EVALUATE = """\
Judge a head by itself, without serving it: acceptance by depth of a chain (0-α, 1-α, …) from every position, and the
mean accepted length that serving these answers with a tree would show. Use answers the head was not trained on,
written greedily; capture their features first.

  example: vllm-eagle evaluate --model MODEL --head heads/mine/head --features data/judge
"""


_TRAIN = """\
Make a head for a model, from its prompts to an exported head: generate, capture, fit, and a model card. Each step
resumes, so the same command continues after a kill and picks up where it stopped.

  example: vllm-eagle train --model MODEL --prompts prompts.jsonl --out my-head --set steps=4000
"""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the training commands; each sets `run` to a handler that takes the parsed arguments."""
    _add_generate(subparsers)
    _add_capture(subparsers)
    _add_fit(subparsers)
    _add_evaluate(subparsers)
    _add_train(subparsers)


def _command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    head = text.split(".")[0].replace("\n", " ")
    return subparsers.add_parser(name, help=head, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def _add_generate(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cmd = _command(subparsers, "generate", _GENERATE)
    cmd.add_argument("--model", type=Path, required=True, help="folder of the target, Hugging Face layout")
    cmd.add_argument("--out", type=Path, required=True, help="folder for the answer shards; an existing one is resumed")
    cmd.add_argument("--capture", type=Path, metavar="FOLDER", help="keep the features there, too (on a CPU, in float32)")
    _add_generation_options(cmd)
    cmd.set_defaults(run=_generate)


def _add_generation_options(cmd: argparse.ArgumentParser) -> None:
    cmd.add_argument("--prompts", type=Path, help=".jsonl with a field prompt, text or turns (its first turn) in each row")
    cmd.add_argument("--self-prompt", type=int, default=0, metavar="COUNT", help="let the target write COUNT questions, too")
    cmd.add_argument("--limit", type=int, help="stop after so many prompts (sources are taken in turn)")
    cmd.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="shared out evenly over the prompts; no top-p"
    )
    cmd.add_argument("--max-tokens", type=int, default=300, help="longest answer")
    cmd.add_argument("--max-prompt-tokens", type=int, default=512, help="longer prompts are skipped and counted")
    cmd.add_argument("--batch", type=int, default=64, help="sequences at once: the larger, the more tokens a second")
    cmd.add_argument(
        "--dtype",
        default="auto",
        help="float32 is fastest on a CPU without bf16 arithmetic; auto is float32 where features are captured on the way",
    )
    cmd.add_argument("--seed", type=int, default=0, help="of the sampling; another one gives other answers")


def _generate(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from vllm_eagle.train.generate import GenerateConfig, generate

    config = GenerateConfig(
        out=args.out,
        prompts=args.prompts,
        self_prompted=args.self_prompt,
        limit=args.limit,
        temperatures=tuple(args.temperatures),
        max_prompt_tokens=args.max_prompt_tokens,
        max_tokens=args.max_tokens,
        capture=args.capture,
    )

    @cache
    def target() -> Any:
        from vllm_eagle.integration.generate import start_target

        longest = args.max_prompt_tokens + args.max_tokens
        return start_target(args.model, longest, args.batch, args.dtype, args.seed, args.capture is not None)

    def engine(asked: Iterable[Question], capture: bool) -> Iterator[tuple[Answer, Captured | None]]:
        from vllm_eagle.integration.generate import stream_answers

        return stream_answers(target(), asked, args.batch, capture)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))  # noqa: E731
    print(generate(config, tokenizer, decode, engine))


def _add_capture(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cmd = _command(subparsers, "capture", _CAPTURE)
    cmd.add_argument("--model", type=Path, required=True, help="folder of the target, Hugging Face layout")
    cmd.add_argument("--answers", type=Path, nargs="+", required=True, help="answer folders, .jsonl or .jsonl.xz files")
    cmd.add_argument("--out", type=Path, required=True, help="folder for the features; new answers are added to it")
    cmd.add_argument("--batch-tokens", type=int, default=4096, help="tokens of one forward pass")
    cmd.add_argument("--max-length", type=int, default=1024, help="longer sequences are skipped and counted")
    cmd.add_argument(
        "--aux-layers", default="off", metavar="auto|off|I,J,K", help="also keep the inputs of three layers, for recipe eagle3"
    )
    cmd.add_argument("--device", default="cpu", help="cuda where there is one")
    cmd.set_defaults(run=_capture)


def _capture(args: argparse.Namespace) -> None:
    from vllm_eagle.train.capture import CaptureConfig, capture, read_aux_layers
    from vllm_eagle.train.target import Target

    target = Target.load(args.model, device=args.device)
    layers = read_aux_layers(args.aux_layers, target.config.num_hidden_layers)
    sizes = {"batch_tokens": args.batch_tokens, "max_length": args.max_length}
    print(capture(CaptureConfig(tuple(args.answers), args.out, aux_layers=layers, **sizes), target))


def _add_fit(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cmd = _command(subparsers, "fit", _FIT)
    cmd.add_argument("--model", type=Path, required=True, help="folder of the target, Hugging Face layout")
    cmd.add_argument("--features", type=Path, nargs="+", required=True, help="folders that capture wrote")
    cmd.add_argument("--out", type=Path, required=True, help="folder for state, journal and the exported head")
    _add_fit_options(cmd)
    cmd.set_defaults(run=_fit)


def _add_fit_options(cmd: argparse.ArgumentParser) -> None:
    cmd.add_argument("--settings", type=Path, help="TOML file with the settings below; --set wins over it")
    cmd.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings, such as steps=2000 depths=4")
    cmd.add_argument("--start", type=head_folder, metavar="HEAD", help="head to train further, also OWNER/NAME on the hub")
    cmd.add_argument("--device", default="cpu", help="cuda where there is one")
    cmd.add_argument("--judge", type=Path, nargs="+", default=[], help="features of other answers, for the model card")


def _fit(args: argparse.Namespace) -> None:
    from vllm_eagle.train.recipe import Recipe, fit_and_export
    from vllm_eagle.train.settings import read_settings

    settings = read_settings(args.settings, args.set)
    recipe = Recipe(args.model, args.features, args.out, settings, args.start, args.judge, args.device)
    if line := fit_and_export(recipe):
        print(line)


def _add_evaluate(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cmd = _command(subparsers, "evaluate", _EVALUATE)
    cmd.add_argument("--model", type=Path, required=True, help="folder of the target, Hugging Face layout")
    cmd.add_argument("--head", type=head_folder, required=True, help="folder of the head, or its OWNER/NAME on the hub")
    cmd.add_argument("--features", type=Path, required=True, help="folder that capture wrote for held-out answers")
    cmd.add_argument("--limit", type=int, help="use only the first answers")
    cmd.add_argument("--tree-size", type=int, help="most nodes of a tree (default 25); these options are those of serving")
    cmd.add_argument("--tree-depth", type=int, help="levels of a tree (default 5)")
    cmd.add_argument("--tree-top-k", type=int, help="nodes expanded on a level, and candidates of each (default 8)")
    cmd.add_argument("--tree", help="JSON file of a static tree, instead of a dynamic one")
    cmd.add_argument("--aux-layers", type=read_layers, metavar="I,J,K", help="layers an EAGLE-3 head is to read instead")
    cmd.set_defaults(run=_evaluate)


def _evaluate(args: argparse.Namespace) -> None:
    from vllm_eagle.config import Options
    from vllm_eagle.train.judge import as_json, judge

    options = Options(str(args.head), args.tree_size, args.tree_depth, args.tree_top_k, args.tree)
    judged = judge(args.model, args.head, args.features, options.growth(), args.limit, args.aux_layers)
    print(judged.lines())
    print(as_json(judged, args.head))


def _add_train(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cmd = _command(subparsers, "train", _TRAIN)
    cmd.add_argument("--model", type=Path, required=True, help="folder of the target, Hugging Face layout")
    cmd.add_argument("--out", type=Path, required=True, help="folder for answers, features, the fit and the head")
    _add_generation_options(cmd)
    _add_fit_options(cmd)
    cmd.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise EagleError("train runs in one process; run generate and capture, then start fit in several")

    def step(**changes: object) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(args), **changes})

    from vllm_eagle.train.settings import read_settings

    answers, features = args.out / "answers", args.out / "features"
    aux_layers = "auto" if read_settings(args.settings, args.set).recipe == "eagle3" else "off"
    longest = args.max_prompt_tokens + args.max_tokens
    _generate(step(out=answers, capture=features if aux_layers == "off" and _can_capture(args.dtype) else None))
    _capture(step(answers=[answers], out=features, batch_tokens=4096, max_length=longest, aux_layers=aux_layers))
    _fit(step(features=[features], out=args.out / "fit"))


def _can_capture(dtype: str) -> bool:
    from vllm_eagle.integration.generate import can_capture

    return can_capture(dtype)


def main(argv: list[str] | None = None) -> int:
    """Run one command; bad input ends in one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="vllm-eagle", description="Train EAGLE heads.")
    add_commands(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except EagleError as bad:
        print(f"vllm-eagle: {bad}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

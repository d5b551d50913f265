"""The changes we make to vLLM at run time: flags on its command line, an early check, numbers, and two refusals lifted.

Each is a class named for what it does, bound to its target, harmless when applied twice, and listed in `ledger.py`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from types import TracebackType
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams

from vllm_eagle.arguments import read_layers
from vllm_eagle.config import AUTO, KEY
from vllm_eagle.errors import EagleError
from vllm_eagle.speculate import speculate

_OPTION_OF = {
    "speculative_model": "model",
    "speculative_tree_size": "tree_size",
    "speculative_tree_depth": "tree_depth",
    "speculative_tree_top_k": "tree_top_k",
    "speculative_tree": "tree",
    "speculative_draft_vocab": "draft_vocab",
    "speculative_max_context": "max_context",
    "speculative_trace": "trace",
    "speculative_aux_layers": "aux_layers",
}


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a count; want 1 or more")
    return value


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTO else _count(text)


_FLAGS = (
    (
        "--speculative-model",
        str,
        "HEAD",
        "Folder of the EAGLE head, or its OWNER/NAME on a hub; this alone switches trees on.",
    ),
    (
        "--speculative-tree-size",
        _count_or_auto,
        "N",
        "Nodes drafted per request and step, or 'auto', the default: as many as pay at the current load, 25 at most, or none.",
    ),
    ("--speculative-tree-depth", _count, "N", "Levels of the tree, each one pass of the head (default: 5)."),
    ("--speculative-tree-top-k", _count, "N", "Nodes expanded per level, and candidates of each (default: 8)."),
    (
        "--speculative-tree",
        str,
        "PATH",
        "JSON file of a static tree, a list of root-to-node paths of child ranks; instead of size, depth and top-k.",
    ),
    (
        "--speculative-draft-vocab",
        str,
        "PATH",
        "JSON file of the token ids worth drafting, or 'all' (default: draft_vocab.json of the head, if it has one).",
    ),
    (
        "--speculative-max-context",
        _count,
        "N",
        "Draft nothing for a request longer than N tokens (default: the positions the head was made for). Its text goes on.",
    ),
    (
        "--speculative-trace",
        str,
        "FOLDER",
        "Write a page about every request that asks for it (vllm_xargs speculative_trace=true): its trees, step by step.",
    ),
    (
        "--speculative-aux-layers",
        read_layers,
        "I,J,K",
        "Layers of the target whose inputs an EAGLE-3 head reads (default: those its config.json names, or 2, n/2, n-3).",
    ),
)


class Patch:
    """Change one place of vLLM, once per process."""

    _applied = False

    @classmethod
    def apply(cls) -> None:
        """Wrap the target unless that is done."""
        if not cls._applied:
            cls._applied = True
            cls._wrap()

    @classmethod
    def _wrap(cls) -> None:
        raise NotImplementedError


class SpeculativeFlags(Patch):
    """Add `--speculative-model` and the tree options to `EngineArgs`, which has no hook for a plugin's flags.

    `add_cli_args` gets the flags; `from_cli_args` turns them into fields that exist already, wherever they stood on the line.
    """

    @classmethod
    def _wrap(cls) -> None:
        add, build = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__

        @functools.wraps(add)
        def add_cli_args(parser: Any) -> Any:
            parser = add(parser)
            cls._add_to(parser)
            return parser

        @functools.wraps(build)
        def from_cli_args(engine_args: type[EngineArgs], args: argparse.Namespace) -> EngineArgs:
            return build(engine_args, cls._fold(args))

        EngineArgs.add_cli_args = staticmethod(add_cli_args)
        EngineArgs.from_cli_args = classmethod(from_cli_args)

    @staticmethod
    def _add_to(parser: Any) -> None:
        group = parser.add_argument_group(
            "Tree speculation (vllm_eagle)",
            "Draft a tree of tokens with an EAGLE head and verify it in one pass; same text, sooner.",
        )
        for flag, kind, metavar, text in _FLAGS:
            group.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)

    @staticmethod
    def _fold(args: argparse.Namespace) -> argparse.Namespace:
        given = {option: value for flag, option in _OPTION_OF.items() if (value := getattr(args, flag, None)) is not None}
        if not given:
            return args
        _report_in_one_line()
        if "model" not in given:
            raise EagleError(f"--speculative-{next(iter(given)).replace('_', '-')} needs --speculative-model HEAD")
        if getattr(args, "speculative_config", None):
            raise EagleError("--speculative-model and --speculative-config exclude each other; use one of the two")
        folded = argparse.Namespace(**vars(args))
        for field, value in speculate(**given).items():
            if field.endswith("_cls") and getattr(args, field, None) not in (None, "auto", value):
                flag = f"--{field.replace('_', '-')}"
                raise EagleError(f"{flag} and --speculative-model exclude each other: trees bring a class of their own")
            if field == "additional_config":
                value = {**(getattr(args, field, None) or {}), **value}
                if KEY in (getattr(args, field, None) or {}):
                    raise EagleError(f'give the options as flags or in --additional-config "{KEY}", not both')
            setattr(folded, field, value)
        return folded


def _report_in_one_line() -> None:
    """Let the command line end with what is wrong instead of a traceback, for our own errors alone."""
    usual = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, EagleError):
            print(f"vllm: error: {error}", file=sys.stderr)
        else:
            usual(kind, error, traceback)

    sys.excepthook = report


class EarlyCheck(Patch):
    """Check our options against the target in the front end, before processes start and weights load."""

    @classmethod
    def _wrap(cls) -> None:
        create = EngineArgs.create_engine_config

        @functools.wraps(create)
        def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
            from vllm_eagle.integration.checks import check_config, choose_worker, is_ours

            config = create(self, *args, **kwargs)
            choose_worker(config)
            check_config(config)
            StatsOfTrees.apply()  # even if this engine has none: decoders remember types, and the next one may have
            if is_ours(config.speculative_config):
                TreesInPrometheus.apply()
                TreesInTheLog.apply()
            return config

        EngineArgs.create_engine_config = create_engine_config


class StatsOfTrees(Patch):
    """Let the front end decode `TreeStats`: a step's statistics come from the engine's process, decoded by annotation."""

    @classmethod
    def _wrap(cls) -> None:
        from vllm.v1.metrics.stats import SchedulerStats

        from vllm_eagle.integration.metrics import TreeStats

        SchedulerStats.__annotations__["spec_decoding_stats"] = TreeStats | None


class TreesInPrometheus(Patch):
    """Register and record the metrics of trees, where trees are configured."""

    @classmethod
    def _wrap(cls) -> None:
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        from vllm_eagle.integration.checks import is_ours
        from vllm_eagle.integration.metrics import TreeProm

        make = PrometheusStatLogger.__init__

        @functools.wraps(make)
        def __init__(self: PrometheusStatLogger, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            make(self, vllm_config, *args, **kwargs)
            if is_ours(vllm_config.speculative_config):
                self.spec_decoding_prom = TreeProm(self.spec_decoding_prom, self)

        PrometheusStatLogger.__init__ = __init__  # type: ignore[method-assign]


class TreesInTheLog(Patch):
    """Replace the periodic log line about speculation, where trees are configured."""

    @classmethod
    def _wrap(cls) -> None:
        from vllm.v1.metrics.loggers import LoggingStatLogger

        from vllm_eagle.integration.checks import is_ours, read_options
        from vllm_eagle.integration.metrics import TreeLog

        make = LoggingStatLogger.__init__

        @functools.wraps(make)
        def __init__(self: LoggingStatLogger, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            make(self, vllm_config, *args, **kwargs)
            if is_ours(vllm_config.speculative_config):
                self.spec_decoding_logging = TreeLog(read_options(vllm_config).growth().depth)

        LoggingStatLogger.__init__ = __init__  # type: ignore[method-assign]


class TreesTakeAnyParameter(Patch):
    """Lift vLLM's refusal of `min_p` and `logit_bias` under speculation, for trees alone: the walk applies them."""

    @classmethod
    def _wrap(cls) -> None:
        validate = SamplingParams._validate_spec_decode

        @functools.wraps(validate)
        def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
            from vllm_eagle.integration.checks import is_ours
            from vllm_eagle.integration.limits import check_wish
            from vllm_eagle.integration.tracing import check_trace_wish

            if is_ours(speculative_config):
                check_wish(self)
                check_trace_wish(self)
            else:
                validate(self, speculative_config)

        SamplingParams._validate_spec_decode = _validate_spec_decode  # type: ignore[method-assign]


class TreesTakeAnyProcessor(Patch):
    """Build every logits processor for trees, custom ones included: under speculation vLLM builds one and refuses the rest."""

    @classmethod
    def _wrap(cls) -> None:
        from vllm.v1.worker import gpu_model_runner

        build = gpu_model_runner.build_logitsprocs

        @functools.wraps(build)
        def build_logitsprocs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_eagle.integration.checks import is_ours

            if is_ours(vllm_config.speculative_config):
                vllm_config = copy.copy(vllm_config)
                vllm_config.speculative_config = None
            return build(vllm_config, *args, **kwargs)

        gpu_model_runner.build_logitsprocs = build_logitsprocs

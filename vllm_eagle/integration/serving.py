"""vLLM's async engine and its OpenAI application, for a server that is not vLLM's own."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from vllm_eagle.errors import EagleError
from vllm_eagle.integration import ledger


class Serving:
    """Hold an engine and what its application needs."""

    def __init__(self, args: Namespace, engine: AsyncLLM) -> None:
        self.args, self.engine = args, engine

    async def application(self) -> Any:
        """Return vLLM's own OpenAI application around the engine."""
        tasks = await self.engine.get_supported_tasks()
        app = build_app(self.args, tasks, self.engine.model_config)
        await init_app_state(self.engine, app.state, self.args, tasks)
        app.state.server = SimpleNamespace()  # vLLM's error handler sets should_exit on its server; here Serve sees to that
        return app


def start(flags: list[str]) -> Serving:
    """Start an engine from flags of `vllm serve`; raises `EagleError` for flags vLLM does not take.

    Its numbers go to vLLM's own `/metrics` and, named by replica, to Ray's.
    """
    ledger.check(ledger.REPLICA_TOUCHES)
    args = _parse(flags)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine = AsyncLLM.from_vllm_config(
        engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER),
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[RayPrometheusStatLogger, PrometheusStatLogger],  # in this order: each clears the other's registry first
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )
    return Serving(args, engine)


def _parse(flags: list[str]) -> Namespace:
    load_general_plugins()  # our flags among them
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve", exit_on_error=False))

    def refuse(message: str) -> None:
        raise EagleError(f"{message}; arguments are the flags of vllm serve")

    parser.error = refuse
    args = parser.parse_args(flags)
    validate_parsed_serve_args(args)
    return args

"""One replica: what Ray Serve starts, asks how it is, and lets go."""

from __future__ import annotations

import os
from typing import Any

from vllm_eagle.envs import preload


class Replica:
    """Hold an engine and vLLM's OpenAI application around it; Serve calls the methods and passes on requests."""

    async def __init__(self, flags: list[str]) -> None:  # type: ignore[misc]  # Serve awaits it, in the loop of the requests
        """Start the engine from flags of `vllm serve`; what it raises is the reason Serve reports."""
        _environment()
        from vllm_eagle.integration.serving import start

        self._serving = start(flags)

    async def __serve_build_asgi_app__(self) -> Any:
        from ray import serve

        return Named(await self._serving.application(), serve.get_replica_context().replica_id.unique_id)

    async def check_health(self) -> None:
        """Raise if the engine is dead: Serve then replaces this replica."""
        await self._serving.engine.check_health()

    async def __del__(self) -> None:
        if (serving := getattr(self, "_serving", None)) is not None:
            serving.engine.shutdown()


class Named:
    """Say in every answer which replica gave it, in the header `x-replica`."""

    def __init__(self, app: Any, name: str) -> None:
        """Wrap an ASGI application."""
        self.app, self._header = app, (b"x-replica", name.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self.app(scope, receive, named)


def _environment() -> None:
    """Keep replicas of one machine off each other's cores: left alone, vLLM binds the threads of each to the same ones."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # how many: OMP_NUM_THREADS, which Ray sets to num_cpus
    if wanted := preload():
        os.environ["LD_PRELOAD"] = wanted  # for the engine's process

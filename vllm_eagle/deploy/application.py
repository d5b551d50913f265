"""The application Ray Serve deploys: `import_path: vllm_eagle.deploy:build` in its configuration."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_eagle.errors import EagleError

if TYPE_CHECKING:
    from ray.serve import Application

NAME = "Engine"
"""Name of the one deployment, for the `deployments` of a configuration."""
ATTEMPTS = 2
"""How often a replica's start is tried before the reason is reported and the deployment given up."""
_PATHS = ("model", "speculative-model", "speculative-tree", "speculative-draft-vocab", "chat-template")


def build(arguments: dict[str, Any]) -> Application:
    """Return the application for a configuration's `args`, flags of `vllm serve` without their dashes; raises `EagleError`."""
    return replicated(arguments)


def replicated(arguments: Mapping[str, Any], **options: Any) -> Application:
    """Return the same from Python, where `options` are those of a Ray Serve deployment: `num_replicas=2`, ...

    Raises `EagleError` if Ray is missing, or if the arguments cannot be flags.
    """
    serve = ray_serve()
    from vllm_eagle.deploy.replica import Replica

    defaults = {
        "name": NAME,
        "max_ongoing_requests": 64,
        "max_constructor_retry_count": ATTEMPTS,
        "health_check_period_s": 2,
        "health_check_timeout_s": 60,  # a replica that loads a long prompt answers late, and is well
        "graceful_shutdown_timeout_s": 300,
    }
    deployment = serve.deployment(serve.ingress()(Replica))
    return deployment.options(**defaults | options).bind(flags(arguments))


def ray_serve() -> Any:
    """Import Ray Serve; raises `EagleError` with what to install."""
    try:
        from ray import serve
    except ImportError as wrong:
        raise EagleError(f"Ray is missing ({wrong}); pip install 'vllm-eagle[ray]'") from None
    return serve


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Write arguments as flags: true alone, false left out, `$NAME` and `~` in paths filled in, paths that exist absolute."""
    if not arguments.get("model"):
        raise EagleError("args of the application: want model, the folder of the target, and speculative-model, its head")
    written = []
    for name, value in arguments.items():
        name = name.replace("_", "-")
        if value is False or value is None:
            continue
        written.append(f"--{name}")
        if value is not True:
            written.append(_path(name, str(value)) if name in _PATHS else _text(value))
    return written


def _path(name: str, value: str) -> str:
    found = os.path.expanduser(os.path.expandvars(value))
    if missing := re.search(r"\$\{?(\w+)", found):
        raise EagleError(f"{name}: {value}, and the environment has no {missing[1]}; set it where the cluster starts")
    return str(Path(found).resolve()) if Path(found).exists() else found


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)

"""What is found out before a replica starts, and how it is said."""

from __future__ import annotations

import builtins
import socket
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle.cli import main
from vllm_eagle.deploy import replicated
from vllm_eagle.deploy.application import flags
from vllm_eagle.deploy.local import check_port
from vllm_eagle.errors import EagleError, last_error


def test_arguments_become_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a flag that is turned off and passed all the same, and a folder a replica looks for elsewhere."""
    (tmp_path / "head").mkdir()
    monkeypatch.setenv("MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = {
        "model": "$MODELS/target",
        "speculative_model": "head",
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "max-num-seqs": 4,
        "additional-config": {"a": [1]},
    }
    assert flags(given) == [
        *("--model", f"{tmp_path}/target", "--speculative-model", str(tmp_path / "head"), "--enforce-eager"),
        *("--max-num-seqs", "4", "--additional-config", '{"a": [1]}'),
    ]


def test_arguments_that_cannot_be() -> None:
    """Catches a replica that looks for a folder named $HEAD, and one without a model."""
    with pytest.raises(EagleError, match="the environment has no NO_SUCH_HEAD"):
        flags({"model": "m", "speculative-model": "${NO_SUCH_HEAD}/x"})
    with pytest.raises(EagleError, match="want model"):
        flags({"speculative-model": "h"})


def test_options_of_the_deployment(repository: Path) -> None:
    """Catches an endless restart, and options a user gives that defaults override."""
    deployment = replicated({"model": "m"}, num_replicas=3, health_check_period_s=7)._bound_deployment
    assert deployment.name == "Engine"
    assert deployment.num_replicas == 3
    config = deployment._deployment_config
    assert (config.max_constructor_retry_count, config.health_check_period_s) == (2, 7)
    assert config.graceful_shutdown_timeout_s == 300


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches replicas that start for minutes and are never reached."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EagleError, match=f"port {port}: .*--port"):
            check_port(port)
    check_port(port)


def test_without_ray(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where the extra is missing."""
    usual = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ImportError("No module named 'ray'")
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["ray-demo"]) == 2
    assert "pip install 'vllm-eagle[ray]'" in capsys.readouterr().err


def test_the_reason_of_a_failure() -> None:
    """Catches the last line of a report of several processes in place of the error."""
    report = (
        'Failed to start.\nray.exceptions.RayTaskError(HeadError): ray::Engine()\n  File "x.py", line 3\n'
        "vllm_eagle.errors.HeadError: head: hidden_size is 32, the target has 64\n\nMore in the log."
    )
    assert last_error(report).endswith("HeadError: head: hidden_size is 32, the target has 64")
    assert last_error("no error at all") == "no error at all"

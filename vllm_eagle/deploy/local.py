"""A Ray cluster on this machine, for the length of a block: what the demo, the example and the tests run on."""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_eagle.deploy.application import ray_serve
from vllm_eagle.errors import EagleError, last_error

if TYPE_CHECKING:
    from ray.serve import Application

SETTINGS = {
    "RAY_worker_niceness": "0",  # by default replicas give way to everything else on the machine (nice 15)
    "RAY_process_group_cleanup_enabled": "1",  # the engine of a replica that is killed goes with it
    "RAY_metrics_report_interval_ms": "2000",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "1",  # a replica that is busy answers later than in 0.1 s, and is passed over
}
"""Environment a cluster wants to start with, `ray start` on every machine included; what is set already is kept."""


@contextmanager
def serving(app: Application, *, port: int = 8000, cpus: int | None = None, logs: bool = True) -> Iterator[str]:
    """Deploy on a cluster of its own; yields the address once all replicas answer, and ends everything afterwards.

    `cpus`: how many Ray may give away (default: those of the machine); `logs`: show those of the replicas. Raises
    `EagleError` if the port is taken, or with the reason a replica does not start.
    """
    serve = ray_serve()
    import ray

    check_port(port)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level="ERROR", log_to_driver=logs)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy(app)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(app: Application, name: str = "default", **options: str) -> None:
    """Deploy on the running cluster and wait until it answers; raises `EagleError` with the reason a replica does not start."""
    serve = ray_serve()
    try:
        serve.run(app, name=name, **options)
    except RuntimeError as wrong:  # says which deployment; why is in the status
        deployments = serve.status().applications[name].deployments.values()
        report = "\n".join([str(wrong), *(deployment.message for deployment in deployments)])
        raise EagleError(f"no replica starts: {last_error(report)}") from None


def check_port(port: int) -> None:
    """Raise `EagleError` if somebody listens there: Serve would wait for a replica that nobody reaches."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as wrong:
            raise EagleError(f"port {port}: {wrong.strerror}; stop what listens there, or choose another with --port") from None


def tree_metrics() -> dict[str, dict[str, float]]:
    """Return vLLM's counts of speculation by replica, as Ray exports them for Prometheus on every machine."""
    import ray

    found: dict[str, dict[str, float]] = defaultdict(dict)
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        for name, labels, value in re.findall(r"^ray_vllm_spec_decode_(\w+)\{([^}]*)\} (\S+)$", text, re.M):
            if (replica := re.search(r'ReplicaId="(\w+)"', labels)) and "le=" not in labels and "position=" not in labels:
                found[replica[1]][name] = found[replica[1]].get(name, 0.0) + float(value)
    return dict(found)

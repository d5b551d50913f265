"""Serve a model with trees from several replicas behind one address, on this machine, until Ctrl-C.

python examples/ray_serve.py --model MODEL --head HEAD --replicas 2

On a cluster use configs/deploy/ray.yaml with `serve run` or `serve deploy` instead.
"""

import argparse
import os
import signal
import sys
from contextlib import suppress

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, of each replica; vLLM's default is sized for one server

from vllm_eagle import EagleError
from vllm_eagle.deploy import replicated
from vllm_eagle.deploy.local import serving


def main() -> None:
    """Start the replicas and wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="threads of each replica")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()

    app = replicated(
        {  # flags of vllm serve
            "model": arguments.model,
            "speculative-model": arguments.head,
            "served-model-name": "default",
            "dtype": "float32",
            "enforce-eager": True,
            "max-model-len": 512,
        },
        num_replicas=arguments.replicas,  # or autoscaling_config={...}, and any other option of a deployment
        ray_actor_options={"num_cpus": arguments.cpus},
    )
    cpus = arguments.replicas * arguments.cpus
    with serving(app, port=arguments.port, cpus=cpus) as url:
        print(f"{url}/v1 is ready; Ctrl-C ends it", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    try:
        main()
    except EagleError as wrong:
        sys.exit(f"ray_serve.py: {wrong}")

"""Several replicas behind one address: vLLM's own engine and OpenAI application on Ray Serve."""

from vllm_eagle.deploy.application import build

__all__ = ["build"]

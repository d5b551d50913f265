"""Several replicas behind one address: vLLM's own engine and OpenAI application on Ray Serve."""

from vllm_eagle.deploy.application import build, replicated

__all__ = ["build", "replicated"]

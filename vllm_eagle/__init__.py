"""Tree speculative decoding with EAGLE heads, as a plugin for an unmodified vLLM."""

from vllm_eagle.errors import EagleError, HeadError, TreeError
from vllm_eagle.speculate import speculate

__all__ = ["EagleError", "HeadError", "TreeError", "speculate"]
__version__ = "0.1.0"

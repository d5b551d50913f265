"""A picture of one answer: every token coloured by how it came, and the tree of every step."""

from vllm_eagle.trace.page import page
from vllm_eagle.trace.record import Trace, TracedStep

__all__ = ["Trace", "TracedStep", "page"]

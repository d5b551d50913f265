"""Test doubles for everybody's tests: tiny models, and drafters whose acceptance is known beforehand.

LLM(tiny_target(folder), **speculate(drafter="vllm_eagle.testing.Oracle", tree_size=12,
drafter_options={"texts": "texts.json", "depth": 4, "width": 3, "sibling": 2}))
"""

from vllm_eagle.testing.doubles import Half, Hostile, Oracle
from vllm_eagle.testing.recording import CheckedDrafter
from vllm_eagle.testing.tiny import tiny_head, tiny_target, write_target

__all__ = ["CheckedDrafter", "Half", "Hostile", "Oracle", "tiny_head", "tiny_target", "write_target"]

"""Verification: a walk down each tree with the target's own sampler."""

from vllm_eagle.verify.walk import STOPPED, SampleLevel, Walk, retrace, walk, walk_greedy

__all__ = ["STOPPED", "SampleLevel", "Walk", "retrace", "walk", "walk_greedy"]

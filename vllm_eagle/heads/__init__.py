"""EAGLE heads: the small layer that extrapolates the target's features."""

from vllm_eagle.heads.checkpoint import load_head, save_head, save_speculators
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.eagle1 import Attend, EagleHead

__all__ = ["Attend", "EagleHead", "HeadConfig", "load_head", "save_head", "save_speculators"]

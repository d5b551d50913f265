"""EAGLE heads: the small layer that extrapolates the target's features."""

from vllm_eagle.heads.base import Head
from vllm_eagle.heads.checkpoint import AnyHead, Checkpoint, check_folder, load_head, new_head, save_head, save_speculators
from vllm_eagle.heads.config import AUX_STATES, HeadConfig, default_aux_layers
from vllm_eagle.heads.eagle1 import EagleHead
from vllm_eagle.heads.eagle3 import Eagle3Head
from vllm_eagle.heads.hub import find_folder
from vllm_eagle.heads.layers import Attend

__all__ = [
    "AUX_STATES",
    "AnyHead",
    "Attend",
    "Checkpoint",
    "Eagle3Head",
    "EagleHead",
    "Head",
    "HeadConfig",
    "check_folder",
    "default_aux_layers",
    "find_folder",
    "load_head",
    "new_head",
    "save_head",
    "save_speculators",
]

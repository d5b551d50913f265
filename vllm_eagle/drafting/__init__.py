"""Drafting: the head grows one tree per request, all requests together."""

from vllm_eagle.drafting.base import Drafter, HeadCache, Known, Pricing
from vllm_eagle.drafting.candidates import DraftVocabulary
from vllm_eagle.drafting.head_drafter import HeadDrafter
from vllm_eagle.drafting.noise import Draws

__all__ = ["DraftVocabulary", "Drafter", "Draws", "HeadCache", "HeadDrafter", "Known", "Pricing"]

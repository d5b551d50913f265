"""Drafting: the head grows one tree per request, all requests together."""

from vllm_eagle.drafting.base import Drafter, HeadCache, Known
from vllm_eagle.drafting.candidates import DraftVocabulary
from vllm_eagle.drafting.head_drafter import HeadDrafter

__all__ = ["DraftVocabulary", "Drafter", "HeadCache", "HeadDrafter", "Known"]

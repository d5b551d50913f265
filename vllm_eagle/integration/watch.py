"""A word to whoever runs the engine when drafts are hardly ever accepted."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vllm_eagle.verify import Walk

logger = logging.getLogger(__name__)

TREES = 500
"""Trees verified before judging."""
USELESS = 0.05
"""Accepted tokens per tree below which a head does nothing."""


class AcceptanceWatch:
    """Count accepted tokens and warn once when almost none are, over a whole window of trees."""

    def __init__(self, head: str | None) -> None:
        self._head, self._trees, self._accepted, self._said = head, 0, 0, False

    def observe(self, walk: Walk, owners: Iterable[int]) -> None:
        """Take a step's walk over the trees of the requests `owners`."""
        for owner in owners:
            self._trees += 1
            self._accepted += len(walk.paths[owner])
        if self._trees >= TREES:
            if self._accepted < USELESS * self._trees and not self._said:
                self._said = True
                logger.warning(
                    "only %d tokens of the last %d trees were accepted: head %s hardly helps. Likely causes: it was trained for"
                    " another target, or for other weights of this one (fine-tuned, quantized); the text is unlike its training"
                    " data (another language, code, no chat template); a very high temperature",
                    self._accepted,
                    self._trees,
                    self._head,
                )
            self._trees = self._accepted = 0

"""What the head has not read yet: after a step without its pass, the next pass starts where the last one ended."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from vllm_eagle.drafting import Known

LIMIT = 4096
"""Most positions kept of a request; a longer gap stays a gap, which costs acceptance and nothing else."""


class Backlog:
    """Keep the features of certain positions by request, as far as the head has no K/V of them."""

    def __init__(self) -> None:
        self._missed: dict[str, tuple[int, Tensor]] = {}  # first position, features [n, D]

    def keep(self, known: Known) -> None:
        """Remember a step whose pass did not happen; `known` holds what was missed before it, too."""
        features = known.features.split(known.lengths.tolist())
        for request, end, mine in zip(known.request_ids, known.ends.tolist(), features, strict=True):
            if len(mine) <= LIMIT:
                self._missed[request] = int(known.positions[end]) - len(mine) + 1, mine.clone()
            else:
                self._missed.pop(request, None)

    def join(self, known: Known) -> Known:
        """Return `known` with the missed positions before it, and forget them; gaps are not closed."""
        if not self._missed:
            return known
        parts = zip(known.request_ids, known.lengths.tolist(), known.ends.tolist(), known.histories, strict=True)
        features, tokens, positions, lengths = [], [], [], []
        device = known.positions.device
        for request, count, end, history in parts:
            new, last = known.features[end + 1 - count : end + 1], int(known.positions[end])
            first, missed = self._missed.pop(request, (0, new[:0]))
            if first + len(missed) + count != last + 1:  # preempted since then, or served from the prefix cache
                missed = new[:0]
            count += len(missed)
            place = np.arange(last + 1 - count, last + 1)
            features += [missed, new]
            tokens.append(history[place + 1])
            positions.append(place)
            lengths.append(count)
        return dataclasses.replace(
            known,
            features=torch.cat(features),
            next_tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device),
            positions=torch.from_numpy(np.concatenate(positions)).to(device),
            lengths=torch.tensor(lengths, dtype=torch.int32),
        )

    def drop(self, request: str) -> None:
        """Forget an ended request."""
        self._missed.pop(request, None)

    def __len__(self) -> int:
        return len(self._missed)

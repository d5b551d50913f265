"""How keys and values lie inside a block of the engine's paged cache.

A block of one K/V head holds `block` tokens and is `block * 2K` numbers, whatever the engine did inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedLayout:
    """Read tokens out of cache blocks [n, G, block, 2K]."""

    name: str
    keys: Callable[[Tensor], Tensor]  # -> [n, G, block, K]
    values: Callable[[Tensor], Tensor]  # -> [n, G, block, K]

    def gather(self, cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` keys and values [length, G, K] of a request's `blocks`."""
        pages = cache[blocks.long()]
        return self._tokens(self.keys(pages), length), self._tokens(self.values(pages), length)

    @staticmethod
    def _tokens(pages: Tensor, length: int) -> Tensor:
        return pages.transpose(1, 2).flatten(0, 1)[:length]

    def holds(self, write: Callable[[Tensor, Tensor, Tensor, Tensor], None], cache: Tensor) -> bool:
        """Check the layout against the engine's own `write(key, value, cache, slots)` on a scratch cache.

        Writes a distinct number into every (token, head, dimension) and reads it back; `cache` is left dirty.
        """
        blocks, heads, block, double = cache.shape
        tokens, size = blocks * block, double // 2
        # Small integers are exact in every dtype: token, head and dimension are tagged one after another.
        for axis in range(3):
            grid = torch.meshgrid(torch.arange(tokens), torch.arange(heads), torch.arange(size), indexing="ij")[axis]
            key = (grid % 127 + 1).to(cache.dtype)
            write(key, -key, cache, torch.arange(tokens))
            got_key, got_value = self.gather(cache, torch.arange(blocks), tokens)
            if not (torch.equal(got_key, key) and torch.equal(got_value, -key)):
                return False
        return True


def _vec_keys(pages: Tensor) -> Tensor:
    count, heads, block, double = pages.shape
    return pages.reshape(count, heads, 2, double // 2, block)[:, :, 0].transpose(-1, -2)


def _vec_values(pages: Tensor) -> Tensor:
    count, heads, block, double = pages.shape
    return pages.reshape(count, heads, 2, block, double // 2)[:, :, 1]


VEC_LAYOUT = PagedLayout("vec", _vec_keys, _vec_values)
"""vLLM's CPU layout: first half of a block is K transposed [K, block], second half V [block, K]."""


def _pair_keys(pages: Tensor) -> Tensor:
    return pages[..., : pages.shape[-1] // 2]


def _pair_values(pages: Tensor) -> Tensor:
    return pages[..., pages.shape[-1] // 2 :]


PAIR_LAYOUT = PagedLayout("pair", _pair_keys, _pair_values)
"""vLLM's layout on CUDA, whatever the strides: a token's key of a head and its value stand side by side."""

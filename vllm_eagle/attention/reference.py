"""Tree attention as it is defined: gather the pages, append the tree's keys, mask, softmax. The specification."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_eagle.attention.layout import PagedLayout
from vllm_eagle.tree.rows import TreeRows


class ReferenceTreeAttention:
    """Attend with a Python loop over requests; any dtype, any layout."""

    def __init__(self, layout: PagedLayout) -> None:
        self.layout = layout

    def __call__(
        self,
        query: Tensor,
        tree_key: Tensor,
        tree_value: Tensor,
        cache: Tensor,
        rows: TreeRows,
        scale: float,
        output: Tensor,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """See `TreeAttention`; `sinks` [H] are scores without a value, `scales` the factors of keys and of values."""
        block = cache.shape[2]
        group = query.shape[1] // tree_key.shape[1]
        for r in range(len(rows.num_rows)):
            start, count, word = int(rows.query_start[r]), int(rows.num_rows[r]), int(rows.first_word[r])
            context = int(rows.context_len[r])
            seen = _bits(rows.words[word : word + count])  # [count, keys]
            first, keys = int(rows.key_start[r]), seen.shape[1]
            past_key, past_value = self.layout.gather(cache, rows.block_table[r, : -(-context // block)], context)
            key = torch.cat((past_key, tree_key[first : first + keys]))  # [S, G, K]
            value = torch.cat((past_value, tree_value[first : first + keys]))
            key, value = key.float() * scales[0], value.float() * scales[1]
            mask = torch.cat((torch.ones(count, context, dtype=torch.bool), seen), dim=1)  # [count, S]
            if window:
                mask &= _within(seen, context, window)
                value = torch.where(mask.any(0)[:, None, None], value, 0.0)  # such blocks may hold anything by now
            here = slice(start, start + count)
            output[here] = _attend(query[here], key, value, mask, group, scale, soft_cap, sinks)


def _within(seen: Tensor, context: int, window: int) -> Tensor:
    """Mask the keys [count, context + keys] whose positions lie within the window of each row, given its ancestors.

    A row stands behind the context and its ancestors, themselves in order of depth.
    """
    places = torch.cat((torch.arange(context).expand(len(seen), -1), context - 1 + seen.cumsum(1)), dim=1)
    own = context - 1 + seen.sum(1, keepdim=True)
    return places > own - window


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, group: int, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    key, value = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))  # [H, S, K]
    scores = query.float().transpose(0, 1) @ key.transpose(1, 2) * scale  # [H, count, S]
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # one more place that takes a share and has no value
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(query), 1)), dim=2)
    weights = scores.softmax(-1)[:, :, : key.shape[1]]
    return (weights @ value).transpose(0, 1).to(query.dtype)


def _bits(words: Tensor) -> Tensor:
    """Unpack ancestor words [n] into a mask [n, keys], as wide as the highest bit set."""
    mask = (words.unsqueeze(1) >> torch.arange(64)) & 1 == 1
    used = mask.any(0).nonzero()
    return mask[:, : int(used[-1]) + 1 if len(used) else 0]

"""The head's keys and values in vLLM's paged cache: its layers are vLLM attention layers like the target's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_eagle.drafting import Known
from vllm_eagle.tree import TreeRows

if TYPE_CHECKING:
    from vllm_eagle.integration.runner import TreeRunner


class PagedHeadCache:
    """Serve one step: what became certain is written to the head's slots, guesses stay outside (see `HeadCache`)."""

    def __init__(self, runner: TreeRunner, known: Known) -> None:
        self.layers, self.attention = runner.drafter.layers, runner.tree_attention
        if not self.layers:
            return
        group = runner.drafter.group
        blocks = runner.input_batch.block_table[group.kv_cache_group_id]
        table = blocks.get_device_tensor(len(known.lengths))
        device = known.positions.device
        owners = torch.arange(len(known.lengths)).repeat_interleave(known.lengths.long()).to(device)
        size = blocks.block_size
        self.slots = table[owners, known.positions // size].long() * size + known.positions % size
        self.context = (known.positions[known.ends] + 1).to(torch.int32)  # [R]
        self.table = group.map_to_kernel_block_table(table)
        self.builder = group.get_metadata_builder(0)
        self.ends = self._metadata(torch.ones_like(known.lengths), self.slots[known.ends])
        self.all = self._metadata(known.lengths, self.slots) if len(self.layers) > 1 else None

    def _metadata(self, counts: Tensor, slots: Tensor) -> Any:
        """Return vLLM's metadata for the last `counts` [R] known positions of each request."""
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)))
        return self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts.to(slots.device),
                query_start_loc_cpu=starts,
                seq_lens=self.context,
                num_reqs=len(counts),
                num_actual_tokens=len(slots),
                max_query_len=int(counts.max()),
                max_seq_len=int(self.context.max()),
                block_table_tensor=self.table,
                slot_mapping=slots,
            ),
        )

    def attend_known(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `HeadCache`."""
        attention = self.layers[layer]
        attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, self.slots)
        metadata = self.ends if layer == len(self.layers) - 1 else self.all
        return attention.impl.forward(attention, query, key, value, attention.kv_cache, metadata, torch.empty_like(query))

    def level_rows(self, drafting: Tensor, words: Tensor, key_stride: int) -> TreeRows:
        """See `HeadCache`."""
        return TreeRows.of_level(words, key_stride, self.context[drafting], self.table[drafting].contiguous())

    def attend_level(self, layer: int, query: Tensor, tree_key: Tensor, tree_value: Tensor, rows: TreeRows) -> Tensor:
        """See `HeadCache`."""
        attention, output = self.layers[layer], torch.empty_like(query)
        self.attention(query, tree_key, tree_value, attention.kv_cache, rows, attention.impl.scale, output)
        return output

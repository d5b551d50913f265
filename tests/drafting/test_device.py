"""Growing trees on another device than the host's, on meta tensors: whoever reads their numbers or mixes devices fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_eagle.drafting import DraftVocabulary, HeadDrafter, Known
from vllm_eagle.tree import CandidatePool, DynamicGrowth, Growth, StaticGrowth, TreeRows

META = torch.device("meta")


class Head:
    """A head of shapes alone."""

    config = SimpleNamespace(num_layers=2, num_kv_heads=1, head_dim=4)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def __call__(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Any, wanted: Any = None) -> Tensor:
        key = (embeddings + features)[:, None, :4] + positions[:, None, None]
        for layer in range(self.config.num_layers):
            attend(layer, key, key, key)
        return features if wanted is None else features[wanted]


class Cache:
    """A paged cache of shapes alone."""

    def attend_known(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query

    def level_rows(self, drafting: Tensor, words: Tensor, key_stride: int) -> TreeRows:
        context = torch.empty(9, dtype=torch.int32, device=META)
        return TreeRows.of_level(words, key_stride, context[drafting], torch.empty(len(words), 3, device=META))

    def attend_level(self, layer: int, query: Tensor, tree_key: Tensor, tree_value: Tensor, rows: TreeRows) -> Tensor:
        for tensor in (rows.query_start, rows.num_rows, rows.first_word, rows.key_start, rows.context_len, rows.words):
            assert tensor.is_meta
        return query


@pytest.mark.parametrize("growth", [DynamicGrowth(12, 4, 3), StaticGrowth([[0], [1], [0, 0], [0, 1], [0, 0, 0]])])
def test_nothing_comes_to_the_host_while_a_tree_grows(growth: Growth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wait for the device in a level, and a tensor made on the host in the midst of it."""
    kept: list[Tensor] = []

    def trees(self: CandidatePool, roots: Tensor) -> Any:
        kept.append(self.growth.keep(torch.cat(self._values, 1)))
        return [], kept[0]

    monkeypatch.setattr(CandidatePool, "trees", trees)
    monkeypatch.setattr(Known, "roots", torch.tensor([1, 2, 3]))  # come to the host by design, before anything grows
    known = Known(
        request_ids=["a", "b", "c"],
        features=torch.empty(6, 8, device=META),
        next_tokens=torch.empty(6, dtype=torch.long, device=META),
        positions=torch.empty(6, dtype=torch.long, device=META),
        lengths=torch.tensor([1, 3, 2], dtype=torch.int32),
        rooms=[growth.size, 0, growth.size],
        histories=[],
    )
    vocabulary = DraftVocabulary(lambda features: features.new_empty(len(features), 50), torch.arange(50, device=META))
    drafter = HeadDrafter(Head(), lambda tokens: torch.empty(len(tokens), 8, device=META), vocabulary, growth)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shorter"):  # no trees came back
        drafter.draft(known, Cache())  # type: ignore[arg-type]
    assert kept[0].shape == (2, growth.size) and (kept[0].is_meta or isinstance(growth, StaticGrowth))

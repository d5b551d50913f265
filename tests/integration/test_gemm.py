"""Packed products of the head: what 8 bits change, and what they must not."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from vllm_eagle.heads import load_head
from vllm_eagle.integration.gemm import eight_bit_linear, packed_linear, use_packed_linears
from vllm_eagle.testing import tiny_head

current_platform.import_kernels()


@pytest.fixture
def weight() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1000, 96, generator=generator) * torch.rand(1000, 1, generator=generator)


def test_eight_bits_rank_as_full_precision_does(weight: Tensor) -> None:
    """Catches scales of another row, rows that overflow, and scales freed while the product still reads them."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 64)[:, None]
    product, exact = eight_bit_linear(weight), packed_linear(weight)(x)
    del weight
    gc.collect()
    found = product(x)
    assert ((found - exact).norm(dim=1) / exact.norm(dim=1)).max() < 0.02
    assert (found.topk(3).indices == exact.argmax(-1, keepdim=True)).any(-1).float().mean() > 0.95


def test_a_row_does_not_depend_on_its_company(weight: Tensor) -> None:
    """Catches one scale for a whole batch: drafts would change with the neighbours."""
    x = torch.randn(40, 96)
    product = eight_bit_linear(weight)
    together = product(x)
    for r in range(40):
        assert torch.equal(product(x[r : r + 1])[0], together[r])


def test_a_row_of_zeros_is_zero(weight: Tensor) -> None:
    """Catches NaN where a token has no weights, or a feature is nothing."""
    weight[7] = 0
    x = torch.randn(3, 96)
    x[1] = 0
    found = eight_bit_linear(weight)(x)
    assert found.isfinite().all() and not found[:, 7].any() and not found[1].any()


def test_without_8_bit_products_nothing_is_rounded(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rounding where it saves nothing."""
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: False)
    x = torch.randn(5, 96)
    torch.testing.assert_close(eight_bit_linear(weight)(x), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_only_feed_forward_layers_are_rounded(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 8 bits in the fusion layer, whose inputs differ tenfold in size: a trained head lost a tenth of what it gains."""
    head = load_head(tiny_head(tmp_path))
    rounded: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "vllm_eagle.integration.gemm.eight_bit_linear", lambda w: rounded.append(tuple(w.shape)) or packed_linear(w)
    )
    mlp = head.layers[0].mlp
    wanted = [tuple(part.weight.shape) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    use_packed_linears(head)
    assert rounded == wanted
    assert not any(isinstance(part, nn.Linear) for part in head.modules())

"""The ledger is true of the installed vLLM, and the documentation shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_eagle.errors import EagleError
from vllm_eagle.integration import ledger, patches
from vllm_eagle.integration.ledger import Touch


def test_every_touch_exists_as_we_know_it() -> None:
    """Catches another vLLM whose method takes something else."""
    patches.SpeculativeFlags.apply()
    patches.EarlyCheck.apply()
    patches.EarlyCheck.apply()  # plugins may load twice
    ledger.check()
    ledger.check(ledger.CUDA_TOUCHES)
    ledger.check(ledger.REPLICA_TOUCHES)


def test_differences_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that accepts everything."""
    method = "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample"
    monkeypatch.setattr(ledger, "TOUCHES", (Touch(method, "", "", "", ("logits",)),))
    with pytest.raises(EagleError, match=r"_sample takes \(logits, spec_decode_metadata\)"):
        ledger.check()
    monkeypatch.setattr(ledger, "TOUCHES", (Touch(method + "_gone", "", "", ""),))
    with pytest.raises(EagleError, match="_sample_gone does not exist"):
        ledger.check()


def test_the_documentation_shows_it(repository: Path) -> None:
    """Catches a touch added without a line in docs/vllm.md."""
    assert ledger.table() in (repository / "docs" / "vllm.md").read_text()

"""vLLM's entry point `vllm.general_plugins`: called once in every vLLM process."""

from __future__ import annotations


def register() -> None:
    """Add our flags to vLLM's command line and check our options before an engine starts; nothing else changes."""
    from vllm_eagle.integration.patches import EarlyCheck, SpeculativeFlags, TreesTakeAnyParameter

    SpeculativeFlags.apply()
    EarlyCheck.apply()
    TreesTakeAnyParameter.apply()

"""vLLM's CPU worker with our runner. Its runner is built inline, hence the change of class right after."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_eagle.errors import EagleError
from vllm_eagle.integration import ledger
from vllm_eagle.integration.patches import TreesTakeAnyProcessor
from vllm_eagle.integration.runner import TreeRunner
from vllm_eagle.integration.startup import share_log
from vllm_eagle.names import ATTENTION_BACKEND


class CPUTreeWorker(CPUWorker):
    """Serve trees on CPU; name it with `--worker-cls`."""

    def init_device(self) -> None:
        """Build vLLM's runner, then adopt it; raises `EagleError` if vLLM built another one."""
        share_log()
        ledger.check()
        TreesTakeAnyProcessor.apply()
        register_backend(AttentionBackendEnum.CPU_ATTN, ATTENTION_BACKEND)
        _cached_get_attn_backend.cache_clear()  # an earlier engine of this process has asked already
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise EagleError(f"trees need vLLM's V1 CPU runner, not {type(self.model_runner).__name__}")
        self.model_runner.__class__ = TreeRunner
        self.model_runner.adopt()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Measure, once everything is loaded and compiled, what steps cost here."""
        times = super().compile_or_warm_up_model()
        self.model_runner.measure()
        return times

    def step_costs(self) -> tuple[list[float], list[float]] | None:
        """Return rows and the seconds of a step with them, None where trees do not follow the load."""
        return self.model_runner.step_costs()

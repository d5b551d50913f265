"""vLLM's GPU worker with our runner. Not run on a GPU."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_eagle.errors import EagleError
from vllm_eagle.integration import ledger
from vllm_eagle.integration.cuda_runner import CUDATreeRunner
from vllm_eagle.integration.patches import TreesTakeAnyProcessor
from vllm_eagle.integration.startup import share_log
from vllm_eagle.names import CUDA_ATTENTION_BACKENDS


class CUDATreeWorker(Worker):
    """Serve trees on CUDA; put in place of the CPU's worker where vLLM runs on CUDA."""

    def init_device(self) -> None:
        """Put our attention in place before layers are built; raises `EagleError`."""
        share_log()
        ledger.check(ledger.CUDA_TOUCHES)
        TreesTakeAnyProcessor.apply()
        for name, path in CUDA_ATTENTION_BACKENDS.items():
            register_backend(AttentionBackendEnum[name], path)
        _cached_get_attn_backend.cache_clear()  # an earlier engine of this process has asked already
        super().init_device()

    def _make_model_runner(self) -> CUDATreeRunner:
        if self.use_v2_model_runner:
            raise EagleError("trees need vLLM's V1 runner; unset VLLM_USE_V2_MODEL_RUNNER")
        return CUDATreeRunner(self.vllm_config, self.device)

    def step_costs(self) -> None:
        """Return nothing: trees do not follow the load on CUDA."""

"""Class paths vLLM resolves by name in its own processes, kept apart so that reading them imports nothing."""

WORKER = "vllm_eagle.integration.worker.CPUTreeWorker"
CUDA_WORKER = "vllm_eagle.integration.cuda_worker.CUDATreeWorker"
CAPTURE_WORKER = "vllm_eagle.integration.capturing.CPUCaptureWorker"
SCHEDULER = "vllm_eagle.integration.scheduler.TreeScheduler"
PROPOSER = "vllm_eagle.integration.proposer.TreeProposer"
ATTENTION_BACKEND = "vllm_eagle.integration.attention.TreeCPUAttentionBackend"
CUDA_ATTENTION_BACKENDS = {
    "FLASH_ATTN": "vllm_eagle.integration.cuda_attention.TreeFlashAttentionBackend",
    "TRITON_ATTN": "vllm_eagle.integration.cuda_attention.TreeTritonAttentionBackend",
}

"""Class paths vLLM resolves by name in its own processes, kept apart so that reading them imports nothing."""

WORKER = "vllm_eagle.integration.worker.CPUTreeWorker"
PROPOSER = "vllm_eagle.integration.proposer.TreeProposer"
ATTENTION_BACKEND = "vllm_eagle.integration.attention.TreeCPUAttentionBackend"

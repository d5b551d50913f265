#!/usr/bin/env bash
# The same with vLLM's own flags only, which needs no change to its command line:
# examples/serve_long_form.sh MODEL HEAD [more flags of vllm serve]
set -euo pipefail
model=$1 head=$2
shift 2
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
exec vllm serve "$model" --dtype float32 --enforce-eager \
  --worker-cls vllm_eagle.integration.worker.CPUTreeWorker \
  --scheduler-cls vllm_eagle.integration.scheduler.TreeScheduler \
  --speculative-config '{"method": "custom_class", "model": "vllm_eagle.integration.proposer.TreeProposer", "num_speculative_tokens": 12}' \
  --additional-config "{\"vllm_eagle\": {\"model\": \"$head\", \"tree_size\": 12}}" "$@"

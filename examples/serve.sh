#!/usr/bin/env bash
# Serve a model with trees: examples/serve.sh MODEL HEAD [more flags of vllm serve]
set -euo pipefail
model=$1 head=$2
shift 2
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
exec vllm serve "$model" --dtype float32 --enforce-eager --speculative-model "$head" --speculative-tree-size 12 "$@"

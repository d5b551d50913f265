#!/bin/sh
# The commands that made the heads in examples/heads, from the repository's root. After the third stage smollm2-135m-eagle1-two-layers
# goes on with a second layer, and once more when there were more answers; smollm2-135m-eagle1 goes on over those answers by itself.
#   MODEL    folder of SmolLM2-135M-Instruct, float32, Hugging Face layout
#   PROMPTS  .jsonl of prompts (not needed: their answers are kept in examples/data)
#   JUDGE    .jsonl of MT-bench's questions; never trained on
#   WORK     folder for features and fits (3 GB)
# The head now in examples/heads saw 1,181 of the answers in its first two stages and left the first at step 700 of 1,800; the third stage is
# whole, over 1,046,107 tokens; the two of two layers saw 1,087,710 and 1,630,187 of the 1,651,031 now kept, the fourth the latter, too. The third's
# list of 16,384 tokens was widened to 24,576 afterwards, which changes no weight.
set -eu
: "${MODEL:?}" "${WORK:?}"
ANSWERS=examples/data/smollm2-135m-answers.jsonl.xz

if [ -n "${PROMPTS:-}" ]; then  # more answers of the target's own
    vllm-eagle generate --model "$MODEL" --prompts "$PROMPTS" --out "$WORK/answers" \
        --max-tokens 300 --max-prompt-tokens 400 --batch 128 --dtype float32
    ANSWERS="$ANSWERS $WORK/answers"
fi
# shellcheck disable=SC2086
vllm-eagle capture --model "$MODEL" --answers $ANSWERS --out "$WORK/features"
vllm-eagle fit --model "$MODEL" --features "$WORK/features" --out "$WORK/first" --settings configs/train/eagle1.toml
vllm-eagle fit --model "$MODEL" --features "$WORK/features" --out "$WORK/second" --start "$WORK/first/head" \
    --settings configs/train/eagle1-second.toml
torchrun --nproc-per-node 2 -m -- vllm_eagle.cli fit --model "$MODEL" --features "$WORK/features" --out "$WORK/third" \
    --start "$WORK/second/head" --settings configs/train/eagle1-third.toml
torchrun --nproc-per-node 2 -m -- vllm_eagle.cli fit --model "$MODEL" --features "$WORK/features" --out "$WORK/two" \
    --start "$WORK/third/head" --settings configs/train/eagle1-two-layers.toml
torchrun --nproc-per-node 2 -m -- vllm_eagle.cli fit --model "$MODEL" --features "$WORK/features" --out "$WORK/more" \
    --start "$WORK/two/head" --settings configs/train/eagle1-two-layers-more.toml
torchrun --nproc-per-node 2 -m -- vllm_eagle.cli fit --model "$MODEL" --features "$WORK/features" --out "$WORK/fourth" \
    --start "$WORK/third/head" --settings configs/train/eagle1-fourth.toml

if [ -n "${JUDGE:-}" ]; then
    vllm-eagle generate --model "$MODEL" --prompts "$JUDGE" --limit 20 --temperatures 0 --max-tokens 128 \
        --batch 20 --dtype float32 --out "$WORK/judge"
    vllm-eagle capture --model "$MODEL" --answers "$WORK/judge" --out "$WORK/judge-features"
    vllm-eagle evaluate --model "$MODEL" --head "$WORK/fourth/head" --features "$WORK/judge-features"
fi

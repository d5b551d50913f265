"""Run by tests in a process of its own: plain vLLM without our plugin, then trees by the long form; prints one JSON line.

VLLM_PLUGINS= python -m tests.integration.other_process TARGET HEAD
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Answer some prompts plainly before anything of ours is imported, then trace what trees accept."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    target, head, prompts, options, tree = json.loads(sys.stdin.read())
    plain = LLM(target, **options)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    outs = plain.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = {
        "ours": [name for name in sys.modules if name.partition(".")[0] == "vllm_eagle"],
        "ids": [list(out.outputs[0].token_ids) for out in outs],
        "metrics": sorted({metric.name for metric in plain.get_metrics()}),
    }
    from tests.integration.harness import greedy, trace
    from vllm_eagle import speculate

    found["trace"] = trace(LLM(target, **options, **speculate(head, **tree)), prompts, greedy(40))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Answer prompts offline with trees: plain vLLM plus one line.

python examples/offline.py --model MODEL --head HEAD
"""

import argparse
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's default is sized for servers

from vllm import LLM, SamplingParams

from vllm_eagle import speculate


def main() -> None:
    """Run both prompts and print what speculation did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree-size", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        disable_log_stats=False,  # so that get_metrics() below has something to say
        **speculate(arguments.head, tree_size=arguments.tree_size),  # the one line
    )
    prompts = ["Name three rivers.", "Why is grass green?"]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for out in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=arguments.tokens), use_tqdm=False):
        print(out.outputs[0].text)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts, accepted = (metrics[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "accepted_tokens"))
    nodes = metrics["vllm:spec_decode_tree_drafted_nodes"]
    print(f"mean accepted length: {1 + accepted / max(1, drafts):.2f}, trees of {nodes.sum / max(1, nodes.count):.1f} nodes")


if __name__ == "__main__":
    main()

"""Print the computed tables of docs/scaling.md: what rows, trees and heads cost for a 70B target, by a roofline.

    python benchmarks/scaling.py

Nothing is measured by this. Shapes and peaks are public; the two efficiencies and the time of an all-reduce are assumptions.
Shapes: `B` rows of a step, `R` requests, `n` nodes of a request, `t` tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2
"""Of a weight, and of a number in the K/V cache: bf16."""
MEMORY_SHARE, ARITHMETIC_SHARE = 0.8, 0.6
"""Of the peaks that real kernels reach: assumed."""
ALL_REDUCE = 10e-6
"""Seconds of a small all-reduce or all-gather between 8 GPUs of one machine: assumed."""
OVERHEAD = 1e-3
"""Seconds a step takes beside its kernels: scheduling, sampling, handing out tokens. Assumed."""
CONTEXT = 2048
"""Tokens of context of every request."""


@dataclass(frozen=True)
class Gpu:
    """Say what a GPU does at most: bytes and bf16 operations (dense) a second, and bytes it holds."""

    name: str
    bandwidth: float
    arithmetic: float
    memory: float

    @property
    def ridge(self) -> float:
        """Return the rows at which a product takes as long as reading its weights: B = F / bandwidth for 2 bytes a weight."""
        return self.arithmetic * BYTES / (2 * self.bandwidth)


GPUS = (
    Gpu("A100 80 GB SXM", 2.039e12, 312e12, 80e9),
    Gpu("H100 80 GB SXM", 3.35e12, 989e12, 80e9),
    Gpu("H200 141 GB SXM", 4.8e12, 989e12, 141e9),
)


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int

    @property
    def layer(self) -> int:
        """Count the weights of a layer: queries and output, keys and values, feed-forward."""
        kv = self.kv_heads * self.head_dim
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.feed_forward)

    @property
    def lm_head(self) -> int:
        """Count the weights of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def read(self) -> int:
        """Count the weights a step reads: all but the embedding."""
        return self.layers * self.layer + self.lm_head

    @property
    def kv(self) -> int:
        """Return the K/V bytes of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * BYTES

    @property
    def head(self) -> int:
        """Count the weights of an EAGLE-1 head of one layer: the fusion of two inputs, and the layer."""
        return 2 * self.hidden**2 + self.layer


LLAMA70 = Shape(80, 8192, 8, 128, 28672, 128256)


def product(gpu: Gpu, weights: float, rows: float) -> float:
    """Return the seconds of products of some weights with rows: reading or arithmetic, whichever takes longer."""
    return max(weights * BYTES / (MEMORY_SHARE * gpu.bandwidth), 2 * weights * rows / (ARITHMETIC_SHARE * gpu.arithmetic))


def step(gpu: Gpu, model: Shape, ranks: int, requests: float, nodes: float) -> float:
    """Return T, the seconds of a step of the target that verifies trees of `nodes` for each of R requests."""
    cache = requests * CONTEXT * model.layers * model.kv / ranks / (MEMORY_SHARE * gpu.bandwidth)
    messages = (2 * model.layers + 1) * ALL_REDUCE if ranks > 1 else 0.0
    return product(gpu, model.read / ranks, requests * (1 + nodes)) + cache + messages + OVERHEAD


def level(gpu: Gpu, model: Shape, ranks: int, rows: float, shared: bool) -> float:
    """Return the seconds of one level of drafting: the head on every rank or shared between them, the LM head shared."""
    messages = (2 + 2 * shared) * ALL_REDUCE if ranks > 1 else 0.0  # embedding and logits; the layer's two
    return product(gpu, model.head / (ranks if shared else 1), rows) + product(gpu, model.lm_head / ranks, rows) + messages


OURS = {0: 0.0, 2: 0.62, 4: 0.81, 8: 1.13, 12: 1.25, 25: 1.41}
"""Accepted tokens by nodes: SmolLM2's head on MT-bench, measured (benchmarks/results, docs/log.md); 2 and 4 are `auto`'s."""
LEVELS = {0: 0, 2: 2, 4: 3, 8: 4, 12: 4, 25: 5}
STRONG = {0: 0.0, 10: 2.49, 60: 3.55}
"""The same of an EAGLE-3 head for an 8B target on GSM8K, published (see docs/scaling.md)."""
DEEP = {0: 0, 10: 5, 60: 7}


def gain(
    gpu: Gpu, ranks: int, requests: int, accepted: dict[int, float], levels: dict[int, int], shared: bool
) -> tuple[int, float]:
    """Return the nodes that make a step's tokens per second largest, and how much faster that is than plain decoding."""
    plain = requests / step(gpu, LLAMA70, ranks, requests, 0)

    def rate(nodes: int) -> float:
        draft = levels[nodes] * level(gpu, LLAMA70, ranks, requests * min(nodes, 8), shared)
        return requests * (1 + accepted[nodes]) / (step(gpu, LLAMA70, ranks, requests, nodes) + draft)

    best = max(accepted, key=rate)
    return best, rate(best) / plain


def ridges() -> list[str]:
    """Return the table of GPUs."""
    lines = ["| GPU | bandwidth | bf16 | ridge B* | requests with 8 nodes | with 25 |", "|---|---|---|---|---|---|"]
    for gpu in GPUS:
        lines.append(
            f"| {gpu.name} | {gpu.bandwidth / 1e12:.2f} TB/s | {gpu.arithmetic / 1e12:.0f} TFLOP/s | {gpu.ridge:.0f} rows |"
            f" {gpu.ridge / 9:.0f} | {gpu.ridge / 26:.0f} |"
        )
    return lines


def heads() -> list[str]:
    """Return the table of what the head costs each rank, replicated and shared."""
    gpu, model = GPUS[1], LLAMA70
    lines = [
        "| ranks | weights of the target | of the head: on every rank / shared | K/V of a token, target |"
        " of the head: on every rank / shared | a level: on every rank / shared | a step, 1 request |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in (2, 4, 8):
        target = (model.read + model.lm_head) * BYTES / ranks / 1e9
        mine, kv = model.head * BYTES / 1e9, model.layers * model.kv / ranks / 1024
        each, share = (1e3 * level(gpu, model, ranks, 8, shared) for shared in (False, True))
        lines.append(
            f"| {ranks} | {target:.1f} GB | {mine:.2f} / {mine / ranks:.2f} GB | {kv:.0f} KiB |"
            f" {model.kv / 1024:.1f} KiB ({model.kv / 1024 / kv:.1%}) / {model.kv / 1024 / ranks:.1f} KiB"
            f" ({1 / model.layers:.1%}) | {each:.2f} / {share:.2f} ms | {1e3 * step(gpu, model, ranks, 1, 0):.1f} ms |"
        )
    return lines


def loads() -> list[str]:
    """Return the table of the best trees by load, 8 H100."""
    gpu, ranks = GPUS[1], 8
    lines = [
        "| requests | step, plain | tokens/s of one request | best tree, a head like ours: on every rank / shared |"
        " a strong head: on every rank / shared |",
        "|---|---|---|---|---|",
    ]
    for requests in (1, 4, 8, 16, 32, 64, 128, 256):
        plain = step(gpu, LLAMA70, ranks, requests, 0)
        cells = []
        for accepted, levels in ((OURS, LEVELS), (STRONG, DEEP)):
            found = [gain(gpu, ranks, requests, accepted, levels, shared) for shared in (False, True)]
            cells.append(" / ".join(f"{nodes} nodes ×{faster:.2f}" if nodes else "none" for nodes, faster in found))
        lines.append(f"| {requests} | {1e3 * plain:.1f} ms | {1 / plain:.0f} | {cells[0]} | {cells[1]} |")
    return lines


def tables() -> str:
    """Return all tables, in the order of the page."""
    return "\n\n".join("\n".join(lines) for lines in (ridges(), heads(), loads())) + "\n"


if __name__ == "__main__":
    print(tables(), end="")

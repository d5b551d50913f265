"""Target families: trees on tiny random models of each architecture write what plain decoding of the same engine writes."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state

from tests.integration.harness import (
    counters,
    drafting,
    engine,
    generate,
    greedy,
    preemptions,
    prompts,
    runner_of,
    since,
    watching,
)
from vllm_eagle import speculate
from vllm_eagle.heads import load_head
from vllm_eagle.integration.checks import ARCHITECTURES
from vllm_eagle.testing import Half, Oracle, tiny_head, write_target
from vllm_eagle.train.features import Example
from vllm_eagle.train.served import draft_everywhere
from vllm_eagle.train.target import Target
from vllm_eagle.train.words import Ends
from vllm_eagle.tree import DraftTree

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
HEAD_SIZE = {"head_dim": 32}
GEMMA = {"sliding_window": 20, "query_pre_attn_scalar": 32, "num_hidden_layers": 4, "tie_word_embeddings": True, **HEAD_SIZE}
THREE = ["sliding_attention", "sliding_attention", "full_attention"]
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.05}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None, **HEAD_SIZE}),
    "mistral-window": ("Mistral", {"sliding_window": 20, **HEAD_SIZE}),
    "mistral-narrow": ("Mistral", {"sliding_window": 3, **HEAD_SIZE}),  # less than a tree is deep
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {**HEAD_SIZE, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", {**GEMMA, **CAPS}),  # a window in every second layer
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 3, "layer_types": THREE}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **HEAD_SIZE}),
    "qwen2-moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 64, **EXPERTS}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, **HEAD_SIZE}),
}
LENGTHS = [5, 120, 33, 90, 64, 7]
TOKENS = 24
ASKED = prompts(LENGTHS)
GREEDY = [greedy(TOKENS)] * len(ASKED)


@dataclass(frozen=True)
class Pair:
    """Plain decoding and trees on one target, with what plain decoding writes."""

    base: LLM
    tree: LLM
    target: str
    head: str
    greedy: list[list[int]]
    sampling: list[SamplingParams]
    seeded: list[list[int]]


def let_experts_in() -> None:
    """Make vLLM's group of experts where an earlier engine of this process, without experts, made all groups but that."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state._EP = parallel_state.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")


def write_family(name: str, folder: Path) -> str:
    """Write a random target of a family; a small embedding leaves the last token a say among others, not the last word."""
    kind, changes = FAMILIES[name]
    kind = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    return write_target(config, folder, embedding=0.01 if config.tie_word_embeddings else 1.0)


def start(target: str, head: str) -> Pair:
    """Start both engines: the trees' one reads prompts in chunks, beside trees, and caches prefixes."""
    let_experts_in()
    base = engine(target, max_num_seqs=6)
    trees = speculate(head, tree_size=40, tree_depth=5, tree_top_k=8)
    tree = engine(target, max_num_seqs=6, max_num_batched_tokens=160, enable_prefix_caching=True, **trees)
    heat = 0.05 if runner_of(base).model_config.hf_config.tie_word_embeddings else 0.9  # small embeddings, small logits
    sampling = [SamplingParams(temperature=heat, seed=r, max_tokens=TOKENS, ignore_eos=True) for r in range(len(ASKED))]
    return Pair(base, tree, target, head, generate(base, ASKED, GREEDY), sampling, generate(base, ASKED, sampling))


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(full_precision: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    target = write_family(request.param, folder / "target")
    return start(target, write_head(folder / "head", Ends.load(Path(target)).embedding))


def write_head(folder: Path, embedding: torch.Tensor) -> str:
    """Write a random head that listens to the embedding as much as to the features, however small it is."""
    path = Path(tiny_head(folder, hidden=SIZES["hidden_size"])) / "model.safetensors"
    weights = load_file(path)
    weights["fc.weight"][:, : SIZES["hidden_size"]] /= embedding.std()
    save_file(weights, path, metadata={"format": "pt"})
    return str(folder)


def check(pair: Pair, wants: list[list[int]], params: list[SamplingParams], shape: dict[str, Any], least: float) -> None:
    """Compare with plain decoding, `least` tokens accepted per step."""
    texts = [prompt + out for prompt, out in zip(ASKED, wants, strict=True)]
    growth = runner_of(pair.tree).drafter.growth
    before = counters(pair.tree)
    kind = Half if "right_depth" in shape else Oracle
    with drafting(pair.tree, kind(runner_of(pair.tree).drafter.drafter, growth, texts=texts, **shape)):
        assert generate(pair.tree, ASKED, params) == wants
    seen = since(before, counters(pair.tree))
    assert seen["accepted_tokens"] >= least * seen["drafts"] > 0


SHAPES = [
    pytest.param({"depth": 1, "width": 2, "sibling": 1}, 0.9, id="level", marks=pytest.mark.slow),
    pytest.param({"depth": 5, "width": 1, "sibling": 0}, 3.5, id="chain", marks=pytest.mark.slow),
    pytest.param({"depth": 4, "width": 3, "sibling": 2, "right_depth": [4, 2, 0, 3]}, 1.0, id="half"),
    pytest.param({"depth": 5, "width": 7, "sibling": 3}, 3.5, id="wide"),
]


@pytest.mark.parametrize(("shape", "least"), SHAPES)
def test_trees_write_what_plain_decoding_writes(pair: Pair, shape: dict[str, Any], least: float) -> None:
    """Catches a position, a mask, a norm or a K/V slot of this family that is another one in a tree (scenarios 1, 2, 7, 9)."""
    assert pair.tree.reset_prefix_cache()
    check(pair, pair.greedy, GREEDY, shape, least)
    check(pair, pair.seeded, pair.sampling, shape, least)  # on top of cached prompts


def test_the_text_hangs_on_the_context(pair: Pair) -> None:
    """Catches a random target that repeats itself whatever it attends to: it would prove nothing."""
    assert min(len(set(out)) for out in pair.greedy) > TOKENS / 4
    others = generate(pair.base, [[*reversed(prompt[:-1]), prompt[-1]] for prompt in ASKED], GREEDY)
    assert all(one != other for one, other in zip(others, pair.greedy, strict=True))


def test_a_neighbour_changes_nothing(pair: Pair) -> None:
    """Catches a target whose ids hang on the batch, plain or with trees: nothing else could be compared."""
    for llm in (pair.base, pair.tree):
        assert generate(llm, ASKED[2:3], GREEDY[:1]) == pair.greedy[2:3]
        assert generate(llm, ASKED[5:], pair.sampling[5:]) == pair.seeded[5:]


@torch.inference_mode()
def test_what_is_drafted_is_what_evaluate_drafts(pair: Pair) -> None:
    """Catches a head that attends through its target's window, another embedding or LM head than training's (scenario 99)."""
    drafted: dict[int, set[tuple[int, ...]]] = {}  # by the length of the text so far
    assert pair.tree.reset_prefix_cache()  # a hit's features are not computed again
    with watching(pair.tree, lambda known, trees: drafted.update({len(known.histories[0]): paths(trees[0])})):
        (out,) = generate(pair.tree, ASKED[1:2], GREEDY[1:2])
    tokens, asked = torch.tensor(ASKED[1] + out), len(ASKED[1])
    (features,) = Target.load(Path(pair.target)).features([tokens.tolist()])
    example = Example(tokens, features[:-1], torch.zeros(len(out), 1, dtype=torch.long), torch.ones(len(out), 1))
    words, growth = Ends.load(Path(pair.target)).words(torch.arange(256)), runner_of(pair.tree).drafter.growth
    evaluated = [paths(tree) for tree in draft_everywhere(load_head(pair.head), example, words, growth)]
    shared = total = 0
    for length, found in drafted.items():
        if found and length - asked - 1 < len(evaluated):
            shared += len(found & evaluated[length - asked - 1])
            total += len(found)
    assert shared > 0.9 * total > 500, (shared, total)  # rounding grows in random layers; what is wrong shares a third


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.nodes, tree.parents[1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def held_by(function: Any) -> list[Any]:
    """Return what a closure holds, and the closures in it."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return held + [thing for inner in held if inspect.isfunction(inner) for thing in held_by(inner)]


def test_73_weights_are_shared(pair: Pair) -> None:
    """Catches a second embedding or LM head in memory, or one that is not the target's (scenario 73)."""
    model, drafter = runner_of(pair.tree).model, runner_of(pair.tree).drafter.drafter
    table = model.model.embed_tokens.weight
    assert drafter.embed is model.model.embed_tokens
    assert all(weight.shape != table.shape for weight in drafter.head.state_dict().values())
    assert drafter.candidates.tokens is None
    held = held_by(drafter.candidates.logits)
    assert not any(isinstance(thing, torch.Tensor) for thing in held)
    # Gemma-2's table, for logits without the cap; else the whole target
    assert any(thing is model or thing is model.model.embed_tokens for thing in held)
    if runner_of(pair.tree).model_config.hf_config.tie_word_embeddings and hasattr(model, "lm_head"):
        assert model.lm_head.weight.data_ptr() == table.data_ptr()


@pytest.mark.slow
def test_windows_where_blocks_are_short(tmp_path: Path) -> None:
    """Catches a row that reads blocks its window has left, others' meanwhile, and slots of another group (scenario 30)."""
    target = write_family("gemma2", tmp_path / "target")
    head, words = write_head(tmp_path / "head", Ends.load(Path(target)).embedding), tmp_path / "words.json"
    words.write_text(json.dumps(list(range(2, 200))))
    asked = prompts([60, 58, 61, 57, 62, 59])  # each grows into another block
    wants = generate(engine(target, max_num_seqs=6), asked, GREEDY)
    trees = speculate(head, tree_size=20, tree_depth=4, tree_top_k=4, draft_vocab=str(words))
    pool = {"num_gpu_blocks_override": 21, "max_model_len": 160, "enable_prefix_caching": True}
    tree = engine(target, max_num_seqs=6, **pool, **trees)
    usual, texts = runner_of(tree).drafter.drafter, [prompt + out for prompt, out in zip(asked, wants, strict=True)]
    shape: dict[str, Any] = {"texts": texts, "depth": 4, "width": 3, "sibling": 2, "right_depth": [4, 2, 0, 3]}
    with drafting(tree, Half(usual, usual.growth, **shape)):
        for _ in range(2):
            assert generate(tree, asked, GREEDY) == wants
    assert preemptions(tree) > 0
    assert generate(tree, asked, GREEDY) == wants  # the head's own drafts, from its list of words
    assert counters(tree)["accepted_tokens"] > 60


def test_every_architecture_was_run() -> None:
    """Catches an architecture accepted that no test has seen."""
    assert {f"{kind}ForCausalLM" for kind, _ in FAMILIES.values()} | {"LlamaForCausalLM"} == ARCHITECTURES

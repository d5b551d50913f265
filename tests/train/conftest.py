"""A toy target (3 layers, vocabulary 256) with its own answers and their features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_eagle.train.answers import Answer, AnswerWriter
from vllm_eagle.train.capture import CaptureConfig, capture
from vllm_eagle.train.features import Example, read_examples
from vllm_eagle.train.target import Target, head_config
from vllm_eagle.train.vocabulary import frequent_tokens
from vllm_eagle.train.words import Ends, Words


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random target: strong opinions that follow mostly, not only, from the last token."""
    folder = tmp_path_factory.mktemp("toy_target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 20
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy_target(toy_folder: Path) -> Target:
    return Target.load(toy_folder)


def greedy(target: Target, prompts: Sequence[Sequence[int]], length: int) -> list[tuple[int, ...]]:
    """Let the target continue prompts of one length greedily."""
    tokens = torch.tensor(prompts)
    for _ in range(length):
        best = target.logits(torch.stack([f[-1] for f in target.features(tokens.tolist())])).argmax(-1)
        tokens = torch.cat((tokens, best[:, None]), dim=1)
    return [tuple(row) for row in tokens[:, len(prompts[0]) :].tolist()]


@pytest.fixture(scope="session")
def toy_answers(toy_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 96 greedy answers of 24 tokens to prompts of 6."""
    folder = tmp_path_factory.mktemp("toy_answers")
    prompts = torch.randint(0, 256, (96, 6), generator=torch.Generator().manual_seed(1)).tolist()
    writer = AnswerWriter(folder, rows_per_shard=40)
    for number, (prompt, out) in enumerate(zip(prompts, greedy(toy_target, prompts, 24), strict=True)):
        writer.write(Answer(f"toy-{number}", tuple(prompt), out, 0.0))
    writer.close()
    return folder


@pytest.fixture(scope="session")
def toy_features(toy_target: Target, toy_answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy_features")
    capture(CaptureConfig((toy_answers,), folder, rows_per_shard=50, batch_tokens=300, aux_layers=(0, 1, 2)), toy_target)
    return folder


@pytest.fixture(scope="session")
def toy_examples(toy_features: Path) -> list[Example]:
    return read_examples(toy_features)


@pytest.fixture(scope="session")
def toy_states(toy_features: Path) -> list[Example]:
    """Return the same examples as an EAGLE-3 head reads them."""
    return read_examples(toy_features, (0, 1, 2))


@pytest.fixture(scope="session")
def toy_words(toy_folder: Path, toy_examples: list[Example]) -> Words:
    vocabulary = frequent_tokens(toy_examples, head_config(toy_folder, 1).vocab_size, 256)
    return Ends.load(toy_folder).words(vocabulary)


@pytest.fixture(scope="session")
def toy_draft_words(toy_folder: Path, toy_examples: list[Example]) -> Words:
    """Cut to the 60 most frequent tokens, in ascending order, as an EAGLE-3 head's rows are."""
    return Ends.load(toy_folder).words(frequent_tokens(toy_examples, 256, 60).sort().values)

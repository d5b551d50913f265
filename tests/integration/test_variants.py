"""Variants of heads in a real engine: what they draft is what the reference loop drafts, and the text is plain decoding's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.engine.arg_utils import EngineArgs

from tests.heads.variants import THREE, VERIFIER, edit_tensors, random_head
from tests.integration.harness import engine, generate, greedy, prompts, runner_of
from tests.integration.test_drafting import readout
from vllm_eagle import speculate
from vllm_eagle.errors import EagleError, HeadError
from vllm_eagle.heads import Eagle3Head, load_head, save_speculators
from vllm_eagle.testing import CheckedDrafter, tiny_target

pytestmark = pytest.mark.usefixtures("full_precision")
LENGTHS = [5, 33, 64, 17]
EVERYTHING = replace(
    THREE,
    **{"vocab_size": 256, "draft_vocab_size": 100, "target_hidden_size": 64, "own_embedding": True, "num_layers": 2},
    **{"norm_before_residual": True, "norm_output": True, "fc_norm": True, "head_dim": 32, "aux_layers": (0, 1, 2)},
)
"""A head narrower than its target, of two layers, with every norm; in the layout of `speculators`."""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def texts(tied: str) -> list[list[int]]:
    return generate(engine(tied, max_num_batched_tokens=64), prompts(LENGTHS), greedy(12))


def test_69_a_head_with_everything(tied: str, texts: list[list[int]], tmp_path: Path) -> None:
    """Catches a flag, width, layer or embedding that serving takes otherwise than the reference loop (scenarios 17, 66, 69)."""
    save_speculators(random_head(EVERYTHING), tmp_path, VERIFIER, torch.float32)
    options: dict[str, Any] = {"tree_size": 12, "tree_depth": 6, "tree_top_k": 3, "aux_layers": [1, 0, 1]}
    llm = engine(tied, max_num_batched_tokens=64, **speculate(str(tmp_path), **options))
    runner, plain = runner_of(llm), load_head(tmp_path)
    assert isinstance(plain, Eagle3Head)
    assert runner.drafter.aux_layers == (1, 0, 1)
    assert isinstance(runner.drafter.drafter.embed, torch.nn.Embedding)  # its own: the target's is wider
    logits = readout(plain, runner.model.compute_logits)
    embed = plain.share_embedding(runner.model.model.embed_tokens)
    checked = CheckedDrafter(runner.drafter.drafter, plain, embed, lambda features: logits(features)[:, plain.vocabulary])
    runner.drafter.drafter = checked
    with torch.inference_mode():
        assert generate(llm, prompts(LENGTHS), greedy(12)) == texts
    assert set(checked.checked) == set(range(6))
    assert max(checked.worst.values()) < 1e-3, checked.worst


def test_73_a_copy_of_the_embedding_is_shared(tied: str, texts: list[list[int]], tmp_path: Path) -> None:
    """Catches a second copy of the target's embedding in memory, most of a released head (scenario 73)."""
    config = replace(THREE, vocab_size=256, draft_vocab_size=100, hidden_size=64, head_dim=32, aux_layers=(0, 1, 1))
    save_speculators(random_head(config), tmp_path, VERIFIER, torch.float32)
    embedding = load_file(Path(tied) / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, **{"embed_tokens.weight": embedding})
    llm = engine(tied, max_num_batched_tokens=64, **speculate(str(tmp_path), tree_size=6))
    runner = runner_of(llm)
    assert load_head(tmp_path).config.own_embedding
    assert runner.drafter.head.embed_tokens is None
    assert runner.drafter.drafter.embed is runner.model.model.embed_tokens
    assert runner.model.lm_head.weight.data_ptr() == runner.model.model.embed_tokens.weight.data_ptr()  # tied, and so shared
    assert not [weight for weight in runner.drafter.head.parameters() if weight.shape[0] == 256]
    assert generate(llm, prompts(LENGTHS), greedy(12)) == texts


def test_layers_of_ones_own(tied: str, head: str, tmp_path: Path) -> None:
    """Catches an override that is taken where it has no effect, or that reads a layer the target has not (scenario 70)."""
    save_speculators(random_head(EVERYTHING), tmp_path, VERIFIER, torch.float32)
    for folder, layers, message in (
        (head, [0, 1, 1], "aux_layers has no effect on an EAGLE-1 head"),
        (str(tmp_path), [0, 1], "must name 3 layers"),
        (str(tmp_path), [0, 1, 3], "reads layer 3, target .* has 2"),
    ):
        with pytest.raises(HeadError, match=message):
            engine(tied, **speculate(folder, aux_layers=layers))


def test_70_a_head_on_the_hub(tied: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a repository's name that serving takes for a folder, or whose draft vocabulary is forgotten (scenario 70)."""
    commit, repository = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--someone--tiny-head"
    shutil.copytree(head, repository / "snapshots" / commit)
    (repository / "snapshots" / commit / "draft_vocab.json").write_text("[5, 6, 7]")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def configure(**options: Any) -> Any:
        arguments = speculate("someone/tiny-head", **options)
        return EngineArgs(model=tied, dtype="float32", max_model_len=512, **arguments).create_engine_config()

    assert configure(tree_top_k=3).additional_config["vllm_eagle"]["model"] == "someone/tiny-head"
    with pytest.raises(EagleError, match=r"takes 4 candidates of each node .*draft_vocab\.json has 3"):
        configure(tree_top_k=4)

"""Bad input ends in one line that names the thing and the fix, before any weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.tree.test_growth import BAD_TREES, GOOD_TREES
from vllm_eagle import EagleError, speculate
from vllm_eagle.names import PROPOSER, SCHEDULER, WORKER
from vllm_eagle.testing import tiny_head


def configure(model: str, **options: Any) -> Any:
    """Go as far as vLLM's front end goes before it starts an engine."""
    return EngineArgs(model=model, dtype="float32", max_model_len=512, **options).create_engine_config()


NAMES = {"gpt2": "GPT2LMHeadModel", "opt": "OPTForCausalLM"}


def edited(folder: str, **changes: Any) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_good_configuration_passes(target: str, head: str) -> None:
    """Catches a check that refuses everything."""
    config = configure(target, **speculate(head, tree_size=12))
    assert config.speculative_config.num_speculative_tokens == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden": 32}, "hidden size 32, target .* has 64"), ({"vocab": 99}, "vocabulary of 99, target .* of 256")],
)
def test_head_of_another_target(target: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Catches a head for another model found out in the first matrix product."""
    folder = tiny_head(tmp_path / "head", **changes)
    with pytest.raises(EagleError, match=message):
        configure(target, **speculate(folder))


def test_eagle3_head_of_another_target(target: str, tmp_path: Path) -> None:
    """Catches a layer the target does not have read as if it were there, or found out when the first request comes."""
    folder = tiny_head(tmp_path / "head", draft_vocab=100)
    edited(folder, eagle_aux_hidden_state_layer_ids=[0, 1, 9])
    with pytest.raises(EagleError, match=r"reads layer 9, target .* has 2; it was trained for another target"):
        configure(target, **speculate(folder))
    edited(folder, eagle_aux_hidden_state_layer_ids=[])  # the usual three need three layers
    with pytest.raises(EagleError, match="the target has 2 layers, EAGLE-3 reads 3"):
        configure(target, **speculate(folder))


def test_words_of_an_eagle3_head(target: str, tmp_path: Path) -> None:
    """Catches a list of words laid over the rows of a head that has its own."""
    folder, words = tiny_head(tmp_path / "head", draft_vocab=100), tmp_path / "words.json"
    words.write_text("[1, 2, 3, 4, 5, 6, 7, 8, 9]")
    with pytest.raises(EagleError, match="EAGLE-3 head with words of its own; remove --speculative-draft-vocab"):
        configure(target, **speculate(folder, draft_vocab=str(words)))
    few = tiny_head(tmp_path / "few", draft_vocab=5)
    with pytest.raises(EagleError, match=r"takes 8 candidates of each node needs as many tokens to draft, .* has 5"):
        configure(target, **speculate(few))


def test_head_with_a_tensor_too_many(target: str, tmp_path: Path) -> None:
    """Catches tensor names checked only after the target's weights are loaded."""
    folder = tiny_head(tmp_path / "head", bias=True)
    edited(folder, bias=False)
    with pytest.raises(EagleError, match=r"fc\.bias is not part of an EAGLE-1 head"):
        configure(target, **speculate(folder))


CONNECTOR = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
"""vLLM's own example, which keeps K/V in files."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 512, "max_num_seqs": 4, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"distributed_executor_backend": "external_launcher"}, "--distributed-executor-backend external_launcher"),
        ({"enable_lora": True, "max_num_seqs": 4}, "--enable-lora"),
        ({"kv_transfer_config": CONNECTOR}, "--kv-transfer-config is not supported together with trees; remove it"),
        ({"long_prefill_token_threshold": 20}, "26 tokens, do not fit --long-prefill-token-threshold 20"),
        ({"max_num_scheduled_tokens": 20}, "25 nodes and its root, 26 tokens, do not fit --max-num-scheduled-tokens 20"),
        (
            {"max_num_batched_tokens": 24, "max_num_seqs": 1},
            "25 nodes and its root, 26 tokens, do not fit --max-num-batched-tokens 24",
        ),
    ],
)
def test_engine_options_that_do_not_go_with_trees(target: str, head: str, options: dict[str, Any], message: str) -> None:
    """Catches an unsupported feature that would give wrong text or a crash later (scenarios 28, 61, 62 and 75)."""
    with pytest.raises(EagleError, match=message):
        configure(target, **speculate(head), **options)


def test_replicas_of_a_mixture_of_experts(head: str, tmp_path: Path) -> None:
    """Catches replicas that step together, one of which would draft while another does not (scenario 89)."""
    config = AutoConfig.for_model("mixtral", architectures=["MixtralForCausalLM"], **TEXT)
    config.save_pretrained(tmp_path)
    with pytest.raises(EagleError, match="for a mixture of experts, whose ranks step together; run one server for each"):
        configure(str(tmp_path), skip_tokenizer_init=True, data_parallel_size=2, **speculate(head))


def test_30_async_scheduling(target: str, head: str) -> None:
    """Catches drafts scheduled before they are known, where trees have no placeholders for them (scenarios 29, 30 and 83)."""
    with pytest.raises(ValueError, match=r"[Aa]sync scheduling is only supported with"):
        configure(target, **speculate(head), async_scheduling=True)
    config = configure(target, **speculate(head))
    assert config.scheduler_config.async_scheduling is False


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_72_another_architecture(head: str, tmp_path: Path, kind: str) -> None:
    """Catches a target without the interface found out after its weights are read: there are none here (scenario 72)."""
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {"hidden_size": 64, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, vocab_size=256, architectures=[NAMES[kind]], **shape)
    config.save_pretrained(tmp_path)
    with pytest.raises(EagleError, match=rf"is {NAMES[kind]}; supported: .*LlamaForCausalLM"):
        LLM(str(tmp_path), dtype="float32", max_model_len=128, skip_tokenizer_init=True, **speculate(head))


TEXT = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 28}
MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": None}
ENCODER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_target_positions": 512}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2}),  # recurrent
    "jamba": ("JambaForCausalLM", TEXT),  # hybrid
    "deepseek_v2": ("DeepseekV2ForCausalLM", TEXT | MLA),
    "whisper": ("WhisperForConditionalGeneration", ENCODER),
}


def of_kind(folder: Path, kind: str, name: str, shape: dict[str, Any]) -> str:
    """Write a configuration without weights."""
    AutoConfig.for_model(kind, architectures=[name], **shape).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", list(OTHERS))
def test_72_other_kinds_of_targets(head: str, tmp_path: Path, kind: str) -> None:
    """Catches a state that cannot be rolled back, a latent cache or an encoder met in the first step (scenario 72)."""
    folder = of_kind(tmp_path, kind, *OTHERS[kind])
    with pytest.raises(EagleError, match=rf"is {OTHERS[kind][0]}; supported: Gemma2ForCausalLM, .*Qwen3MoeForCausalLM"):
        configure(folder, skip_tokenizer_init=True, **speculate(head))


def test_96_multimodal_targets(head: str, tmp_path: Path) -> None:
    """Catches a multimodal target let in by the text model inside it (scenario 96).

    Without torchvision vLLM itself cannot read such an architecture and says so; it is named and refused either way.
    """
    vision = {"model_type": "clip_vision_model", "patch_size": 14, **SMALL}
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEXT}
    folder = of_kind(tmp_path, "llava", "LlavaForConditionalGeneration", {"text_config": text, "vision_config": vision})
    with pytest.raises(ValueError, match=r"is LlavaForConditionalGeneration; supported: |failed to be inspected"):
        configure(folder, skip_tokenizer_init=True, **speculate(head))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"model_impl": "transformers"}, "is TransformersForCausalLM; supported: "), ({"runner": "pooling"}, "--runner pooling")],
)
def test_the_target_is_what_vllm_makes_of_it(target: str, head: str, options: dict[str, Any], message: str) -> None:
    """Catches a supported name in a configuration that vLLM runs as another model (scenario 72)."""
    with pytest.raises(EagleError, match=message):
        configure(target, **speculate(head), **options)


def test_targets_without_support(target: str, head: str, tmp_path: Path) -> None:
    """Catches a target whose attention trees would get wrong in silence."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in Path(target).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edited(str(folder), architectures=["OPTForCausalLM"])
    with pytest.raises(EagleError, match=r"is OPTForCausalLM; supported: .*LlamaForCausalLM"):
        configure(str(folder), **speculate(head))


def test_options(target: str, head: str, tmp_path: Path) -> None:
    """Catches an option accepted without effect, or a wrong one found late."""
    with pytest.raises(EagleError, match=r"tree_size=0"):
        speculate(head, tree_size=0)
    with pytest.raises(EagleError, match=r"tree_size has no effect on the static tree"):
        speculate(head, tree="tree.json", tree_size=3)
    with pytest.raises(EagleError, match="no head given"):
        speculate()
    broken = speculate(head)
    broken["additional_config"]["vllm_eagle"]["tree_width"] = 3
    with pytest.raises(EagleError, match=r"unknown option 'tree_width' of vllm_eagle; known: .*tree_size"):
        configure(target, **broken)
    with pytest.raises(EagleError, match="without a head have no effect"):
        configure(target, additional_config={"vllm_eagle": {"tree_size": 3}})
    long_form = speculate(head) | {"worker_cls": "auto"}
    with pytest.raises(EagleError, match=f"add --worker-cls {WORKER}"):
        configure(target, **long_form)
    with pytest.raises(EagleError, match=f"add --scheduler-cls {SCHEDULER}"):
        configure(target, **speculate(head) | {"scheduler_cls": None})
    mismatch = speculate(head, tree_size=8)
    mismatch["speculative_config"]["num_speculative_tokens"] = 5
    with pytest.raises(EagleError, match=r"num_speculative_tokens=5 .* must be the tree's size, 8"):
        configure(target, **mismatch)
    (tmp_path / "words.json").write_text("[1, 2, 999]")
    with pytest.raises(EagleError, match="token 999 is outside"):
        configure(target, **speculate(head, draft_vocab=str(tmp_path / "words.json")))


def from_flags(target: str, head: str, *flags: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    line = ["--model", target, "--dtype", "float32", "--max-model-len", "512", "--speculative-model", head, *flags]
    return EngineArgs.from_cli_args(parser.parse_args(line))


def test_74_static_trees_on_the_command_line(target: str, head: str, tmp_path: Path) -> None:
    """Catches a tree that cannot work found at the first step, and one whose size vLLM is not told (scenario 74)."""
    file = tmp_path / "tree.json"
    for content, message in BAD_TREES:
        file.write_text(content)
        with pytest.raises(EagleError, match=rf"static tree .*tree\.json.*{message}"):
            from_flags(target, head, "--speculative-tree", str(file))
    for paths in GOOD_TREES:
        file.write_text(json.dumps(paths))
        config = from_flags(target, head, "--speculative-tree", str(file)).create_engine_config()
        assert config.speculative_config.num_speculative_tokens == len(paths)
    (tmp_path / "words.json").write_text("[5, 6, 7]")
    words = ["--speculative-draft-vocab", str(tmp_path / "words.json")]
    file.write_text("[[0], [3]]")
    with pytest.raises(
        EagleError, match=r"takes 4 candidates of each node .*words\.json has 3; lower --speculative-tree-top-k"
    ):
        from_flags(target, head, "--speculative-tree", str(file), *words).create_engine_config()
    file.write_text("[[0], [2]]")
    assert from_flags(target, head, "--speculative-tree", str(file), *words).create_engine_config()
    flags = ["--speculative-tree-depth", "1", "--speculative-tree-top-k", "300"]
    with pytest.raises(EagleError, match=r"takes 300 candidates of each node .* the target has 256"):
        from_flags(target, head, *flags).create_engine_config()


def test_unsupported_vllm(target: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a release whose hooks nobody has run (scenario 77)."""
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.raises(EagleError, match=r"vLLM 0\.99\.0 is not supported; install vllm==0\.32\.0"):
        configure(target, **speculate(head))


def test_without_our_options_nothing_changes(target: str, tmp_path: Path) -> None:
    """Catches the installed plugin touching other methods: vLLM's own chain EAGLE configures as before."""
    folder = tiny_head(tmp_path / "head", bias=False)
    spec = {"method": "eagle", "model": folder, "num_speculative_tokens": 2}
    config = configure(target, speculative_config=spec)
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert configure(target).speculative_config is None
    for parameter in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            SamplingParams(**parameter)._validate_spec_decode(config.speculative_config)


@pytest.mark.parametrize("flag", ["--worker-cls", "--scheduler-cls"])
def test_a_class_of_ones_own_is_not_replaced_in_silence(target: str, head: str, flag: str) -> None:
    """Catches a worker or scheduler the user named, dropped without a word for ours."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", target, "--speculative-model", head, flag, "mine.Own"])
    with pytest.raises(EagleError, match=f"{flag} and --speculative-model exclude each other"):
        EngineArgs.from_cli_args(args)


def test_the_proposer_refuses_vllms_own_worker(target: str, head: str) -> None:
    """Catches the long form without --worker-cls in a process where nothing is patched."""
    from vllm_eagle.integration.proposer import TreeProposer

    config = configure(target, **speculate(head))
    config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
    with pytest.raises(EagleError, match="add --worker-cls"):
        TreeProposer(config)
    assert config.speculative_config.model == PROPOSER


def test_the_command_line_reports_in_one_line(target: str, tmp_path: Path) -> None:
    """Catches a traceback where one line would do."""
    command = [str(Path(sys.executable).parent / "vllm"), "serve", target, "--speculative-model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("vllm: error: no config.json in ")
    assert "Traceback" not in done.stderr

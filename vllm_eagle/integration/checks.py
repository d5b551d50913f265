"""Refuse what cannot work, before weights load, in one line that names the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.platforms import current_platform

from vllm_eagle import envs
from vllm_eagle.config import KEY, Options
from vllm_eagle.drafting.candidates import read_vocabulary
from vllm_eagle.errors import EagleError, HeadError
from vllm_eagle.heads.checkpoint import check_folder
from vllm_eagle.heads.config import HeadConfig
from vllm_eagle.heads.target import TargetShape, misfits
from vllm_eagle.names import CUDA_WORKER, PROPOSER, SCHEDULER, WORKER

TESTED = ("0.32.0",)
"""Releases of vLLM every hook was run against."""

ARCHITECTURES = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Targets run against plain vLLM. Trees need causal attention, windowed or not, and an LM head that reads the hidden state."""


def is_ours(spec: SpeculativeConfig | None) -> bool:
    """Tell whether this configuration speculates with trees."""
    return spec is not None and spec.method == "custom_class" and spec.model == PROPOSER


def read_options(config: VllmConfig) -> Options:
    """Read our options from `additional_config`."""
    extra = config.additional_config
    raw = extra.get(KEY, {}) if isinstance(extra, Mapping) else {}
    if not isinstance(raw, Mapping):
        raise EagleError(f'additional_config["{KEY}"] must be an object of options, not {type(raw).__name__}')
    return Options.from_mapping(raw)


def check_config(config: VllmConfig) -> None:
    """Check a whole configuration; raises `EagleError` for the first thing that cannot work."""
    extra = config.additional_config
    if not is_ours(config.speculative_config):
        if isinstance(extra, Mapping) and KEY in extra:
            raise EagleError("tree options without a head have no effect: add --speculative-model HEAD, or remove them")
        return
    if vllm.__version__.split("+")[0] not in TESTED:
        raise EagleError(f"vLLM {vllm.__version__} is not supported; install vllm=={TESTED[-1]}")
    _check_platform()
    check_worker(config)
    if config.scheduler_config.scheduler_cls != SCHEDULER:
        raise EagleError(f"grammars on trees need our scheduler: add --scheduler-cls {SCHEDULER}")
    _check_engine(config)
    _check_target(config)
    options = read_options(config)
    _check_sizes(config, options)
    head = None if options.model is None else check_folder(options.folder).reading(options.aux_layers)
    if head is not None:
        _check_head(config, head, str(options.model))
    _check_vocabulary(config, options, head)


def choose_worker(config: VllmConfig) -> None:
    """Put the worker for CUDA in the place of the one our flags name, where vLLM runs on CUDA."""
    if current_platform.is_cuda() and is_ours(config.speculative_config) and config.parallel_config.worker_cls == WORKER:
        config.parallel_config.worker_cls = CUDA_WORKER


def check_worker(config: VllmConfig) -> None:
    """Check that the worker is ours, and this platform's; raises `EagleError`."""
    if config.parallel_config.worker_cls != (CUDA_WORKER if current_platform.is_cuda() else WORKER):
        raise EagleError(f"trees need our worker: add --worker-cls {WORKER}")


def _check_platform() -> None:
    if current_platform.is_cuda():
        if not envs.tries_cuda():
            raise EagleError(
                "trees have never been run on a GPU: use vLLM's CPU backend, or set VLLM_EAGLE_CUDA=1 to try what is there"
                " (docs/cuda.md says what was tested, and how)"
            )
    elif not current_platform.is_cpu():
        raise EagleError(f"trees run on vLLM's CPU backend only in this release, not on {current_platform.device_name}")


def _check_engine(config: VllmConfig) -> None:
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:  # dense ranks are engines of their own
        raise EagleError(
            "--data-parallel-size is not supported together with trees for a mixture of experts, whose ranks step together;"
            " run one server for each replica instead"
        )
    if parallel.distributed_executor_backend not in (None, "mp", "uni"):
        raise EagleError(
            f"--distributed-executor-backend {parallel.distributed_executor_backend} is not supported together with trees;"
            " use mp (ray: vLLM 0.32 itself has no such executor for CPUs)"
        )
    refused: dict[str, Any] = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--nnodes": parallel.nnodes > 1,
        "--enable-dbo": parallel.use_ubatching,
        "--async-scheduling": bool(config.scheduler_config.async_scheduling),
        "--enable-lora": config.lora_config is not None,
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "--kv-cache-dtype": config.cache_config.cache_dtype != "auto",
    }
    for flag, used in refused.items():
        if used:
            raise EagleError(f"{flag} is not supported together with trees; remove it, or remove --speculative-model")


def _check_target(config: VllmConfig) -> None:
    model = config.model_config
    if model.architecture not in ARCHITECTURES:  # as vLLM will run it, whatever else its config names
        raise EagleError(f"target {model.model} is {model.architecture}; supported: {', '.join(sorted(ARCHITECTURES))}")
    if model.runner_type != "generate":
        raise EagleError(f"trees write text; --runner {model.runner_type} is not supported together with --speculative-model")
    if model.quantization is not None:
        _check_quantization(model)


def _check_quantization(model: Any) -> None:
    """Let through what was run: 8-bit weights and activations of compressed-tensors, all else in float32."""
    scheme = getattr(model.hf_config, "quantization_config", None) or {}
    groups = [(g.get("weights"), g.get("input_activations")) for g in scheme.get("config_groups", {}).values()]
    eight_bit = all(part and (part.get("type"), part.get("num_bits")) == ("int", 8) for group in groups for part in group)
    if model.quantization != "compressed-tensors" or not groups or not eight_bit or "lm_head" not in scheme.get("ignore", ()):
        raise EagleError(
            f"target {model.model} is quantized ({model.quantization}); supported: compressed-tensors with weights and"
            f" activations in 8 bits (W8A8) and an lm_head left as it was"
        )
    if model.dtype != torch.float32:
        raise EagleError(
            f"target {model.model} is quantized: trees are exact in float32 alone, not in {model.dtype}; use --dtype float32"
        )


def _check_sizes(config: VllmConfig, options: Options) -> None:
    growth, spec = options.growth(), config.speculative_config
    assert spec is not None
    if spec.num_speculative_tokens != growth.size:
        raise EagleError(
            f"num_speculative_tokens={spec.num_speculative_tokens} in --speculative-config must be the tree's size,"
            f" {growth.size}"
        )
    scheduler = config.scheduler_config
    for flag, budget in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold),  # vLLM 0.32 dies of it, 0 is none
    ):
        if budget and growth.size + 1 > budget:
            raise EagleError(
                f"a tree of {growth.size} nodes and its root, {growth.size + 1} tokens, do not fit {flag} {budget};"
                f" lower --speculative-tree-size or raise that"
            )


def _check_vocabulary(config: VllmConfig, options: Options, head: HeadConfig | None) -> None:
    words, top_k = config.model_config.get_vocab_size(), options.growth().top_k
    if head is not None and head.draft_vocab_size is not None:
        if options.draft_vocab is not None:
            raise HeadError(f"head {options.model} is an EAGLE-3 head with words of its own; remove --speculative-draft-vocab")
        words, file = head.draft_vocab_size, options.model
    elif (file := options.vocabulary_file()) is not None:
        words = len(read_vocabulary(file, words))
    if top_k > words:
        raise EagleError(
            f"a tree that takes {top_k} candidates of each node needs as many tokens to draft,"
            f" {file or 'the target'} has {words}; lower --speculative-tree-top-k or the ranks of the static tree"
        )


def _check_head(config: VllmConfig, head: HeadConfig, folder: str) -> None:
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    target = TargetShape(str(model.model), model.get_hidden_size(), model.get_vocab_size(), layers)
    if reasons := misfits(head, folder, target):
        raise HeadError(reasons[0])

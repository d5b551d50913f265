"""Every place where this package touches vLLM: why, how, and when it can go.

`python -m vllm_eagle.integration.ledger` prints the table in `docs/vllm.md`. `check()` compares what we override or wrap
with what is installed, so that another vLLM is refused in one line instead of failing inside a step.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

from vllm_eagle.errors import EagleError


@dataclass(frozen=True)
class Touch:
    """Name one place of vLLM we depend on beyond its public interface."""

    target: str
    """Dotted path of the method or function, in vLLM 0.32."""
    how: str
    why: str
    until: str
    parameters: tuple[str, ...] | None = None
    """Its parameters as we know them, self left out; None where only its presence matters."""


_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_SEAM = "vLLM offers an interface for drafters with structure"
_STATS = "vLLM lets a method of speculation add statistics"

TOUCHES = (
    Touch("vllm.engine.arg_utils.EngineArgs.add_cli_args", "wrapped (SpeculativeFlags)",
          "a plugin has no hook for command-line flags", "vLLM lets plugins add flags", ("parser",)),
    Touch("vllm.engine.arg_utils.EngineArgs.from_cli_args", "wrapped (SpeculativeFlags)",
          "turns the flags into fields that exist already, in any order", "vLLM lets plugins add flags", ("args",)),
    Touch("vllm.engine.arg_utils.EngineArgs.create_engine_config", "wrapped (EarlyCheck)",
          "bad input is found before processes start", "vLLM lets plugins check a configuration",
          ("usage_context", "headless")),
    Touch("vllm.sampling_params.SamplingParams._validate_spec_decode", "wrapped (TreesTakeAnyParameter)",
          "min_p and logit_bias hold on every path of a tree (other methods keep the refusal); checks a request's own size",
          "vLLM asks the method what it supports", ("speculative_config",)),
    Touch("vllm.v1.core.sched.scheduler.Scheduler.__init__", "overridden, calls super last; marks K/V groups as EAGLE's",
          "a prefix hit gives up its last block, whose head K/V were made with another token after it",
          "vLLM marks groups of custom proposers"),
    Touch("vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids", "overridden, calls super first",
          "a grammar prunes a tree instead of cutting it at the first sibling", _SEAM, ("draft_token_ids",)),
    Touch("vllm.v1.core.sched.scheduler.Scheduler.schedule", "overridden, calls super first",
          "tells every rank which rows a grammar left, what hangs where, and the first rank's times", _SEAM,
          ("throttle_prefills",)),
    Touch("vllm.v1.core.sched.scheduler.Scheduler.get_grammar_bitmask", "overridden",
          "a mask for every row of a tree, from the state behind its ancestors", _SEAM, ("scheduler_output",)),
    Touch("vllm.v1.core.sched.scheduler.Scheduler.update_from_output", "overridden, calls super",
          "takes what the runner measured; placeholders are not counted as nodes", _STATS,
          ("scheduler_output", "model_runner_output")),
    Touch("vllm.v1.core.sched.scheduler.Scheduler.make_spec_decoding_stats", "overridden",
          "counts by depth, and keeps the sizes of trees", _STATS,
          ("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id")),
    Touch("vllm.v1.core.sched.scheduler.Scheduler._update_request_with_output", "overridden, calls super first",
          "counts tokens behind the end of their request", _STATS, ("request", "new_token_ids", "is_stale")),
    Touch("vllm.v1.core.sched.scheduler.Scheduler.make_stats", "overridden, calls super",
          "adds what was measured to the statistics of the step", _STATS,
          ("spec_decoding_stats", "kv_connector_stats", "cudagraph_stats", "perf_stats", "ec_connector_stats")),
    Touch("vllm.v1.metrics.stats.SchedulerStats", "annotation of spec_decoding_stats changed (StatsOfTrees)",
          "the front end decodes by annotation; for other methods our type is theirs with empty fields", _STATS),
    Touch("vllm.v1.metrics.loggers.PrometheusStatLogger.__init__", "wrapped (TreesInPrometheus)",
          "registers the metrics of trees, for trees alone; its seam `_spec_decoding_cls` is another one under Ray", _STATS,
          ("vllm_config", "engine_indexes")),
    Touch("vllm.v1.metrics.loggers.LoggingStatLogger.__init__", "wrapped (TreesInTheLog)",
          "one readable line for trees; vLLM's has a number for every node configured", _STATS,
          ("vllm_config", "engine_index")),
    Touch("vllm.v1.spec_decode.metrics.SpecDecodingLogging.log", "overridden, with its class", "the line", _STATS, ("log_fn",)),
    Touch("vllm.v1.structured_output.StructuredOutputManager._get_constraint_bounds", "called",
          "a reasoning section may end inside a tree", "stays", ("request", "spec_tokens", "spec_tokens_committed")),
    Touch("vllm.v1.attention.backends.registry.register_backend", "called for CPU_ATTN, in speculating workers alone",
          "documented way to replace a backend", "stays", ("backend", "class_path", "is_mamba")),
    Touch("vllm.v1.attention.selector._cached_get_attn_backend", "cache cleared after that call",
          "an earlier engine of the process has fixed the choice", "register_backend clears it"),
    Touch("vllm.v1.worker.cpu_worker.CPUWorker.init_device", "overridden; its runner's class is changed afterwards",
          "the CPU worker builds its runner inline", "CPUWorker gets the GPU worker's _make_model_runner", ()),
    Touch("vllm.v1.worker.cpu_model_runner.CPUModelRunner.initialize_kv_cache", "overridden, calls super first",
          "the cache layout is checked, the head's group is found", "stays",
          ("kv_cache_config", "is_profiling", "kv_cache_allocation_context")),
    Touch(f"{_RUNNER}._prepare_inputs", "overridden, calls super first",
          "depth positions and slot -1 for tree rows", _SEAM, ("scheduler_output", "num_scheduled_tokens")),
    Touch(f"{_RUNNER}._build_attention_metadata", "overridden, calls super first",
          "the trees ride on the metadata", _SEAM),
    Touch(f"{_RUNNER}._sample", "overridden", "the walk with vLLM's sampler instead of chain rejection", _SEAM,
          ("logits", "spec_decode_metadata")),
    Touch(f"{_RUNNER}._update_states_after_model_execute", "overridden, calls super first",
          "accepted K/V is committed within the step", _SEAM, ("output_token_ids", "scheduler_output")),
    Touch(f"{_RUNNER}.execute_model", "overridden, calls super",
          "its time is taken, the first rank's of the last step learnt", _STATS,
          ("scheduler_output", "intermediate_tensors")),
    Touch(f"{_RUNNER}.sample_tokens", "overridden, calls super first", "what was measured leaves with the output", _STATS,
          ("grammar_output",)),
    Touch(f"{_RUNNER}._bookkeeping_sync", "overridden, calls super",
          "vLLM rewinds generators of discarded rows, which CPU generators cannot; ours drew nothing",
          "vLLM does not rewind CPU generators"),
    Touch(f"{_RUNNER}._input_fits_in_drafter", "overridden", "near the length limit a tree is cut, not dropped", _SEAM,
          ("common_attn_metadata",)),
    Touch(f"{_RUNNER}.propose_draft_token_ids", "overridden", "drafting with features, for structure", _SEAM,
          ("scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states",
           "aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings")),
    Touch(f"{_RUNNER}.take_draft_token_ids", "overridden, calls super first",
          "the structure travels to the scheduler with the drafts", _SEAM, ()),
    Touch(f"{_RUNNER}._on_request_state_removed", "overridden, calls super first",
          "an ended request's tree is dropped, its page written", "stays", ("req_id", "req_state")),
    Touch("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.forward", "overridden, calls super without trees",
          "tree rows take tree attention", "vLLM's CPU op takes a mask"),
    Touch("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update", "called",
          "writes accepted K/V, and the head's", "stays", ("layer", "key", "value", "kv_cache", "slot_mapping")),
    Touch("vllm.v1.worker.gpu_model_runner.build_logitsprocs", "wrapped (TreesTakeAnyProcessor)",
          "the walk needs the processors of plain decoding, custom ones included", "vLLM builds them under speculation, too"),
    Touch("vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder.sync_batch", "overridden, calls super",
          "a moved request inherits a thinking budget, a preempted one counts anew; and the walk counts without drafts",
          "vLLM mends both", ("batch_update",)),
    Touch("vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder._update_think_state", "called",
          "replays what a preempted request has written", "vLLM does", ("state",)),
    Touch(f"{_RUNNER}.sample_tokens", "overridden when answers are captured, calls super last",
          "keeps hidden states and raw logits before the sampler changes them", "vLLM hands out hidden states of generation",
          ("grammar_output",)),
    Touch("vllm.v1.worker.gpu_model_runner.ExecuteModelState", "read there (scheduler_output, logits, hidden_states)",
          "what a forward pass leaves for the sampler", "vLLM hands out hidden states of generation",
          ("scheduler_output", "logits", "spec_decode_metadata", "spec_decode_common_attn_metadata", "hidden_states",
           "sample_hidden_states", "aux_hidden_states", "ec_connector_output", "cudagraph_stats", "slot_mappings")),
    Touch(f"{_RUNNER}._get_eagle3_aux_layers_from_config", "overridden", "the head's folder names the layers it reads",
          "vLLM asks the drafter", ()),
    Touch("vllm.plugins.load_general_plugins", "called", "`vllm-eagle batch` takes vLLM's flags, ours among them", "stays", ()),
    Touch("vllm.utils.argparse_utils.FlexibleArgumentParser", "called", "the parser of vLLM's flags", "stays"),
    Touch("vllm.tokenizers.cached_tokenizer_from_config", "called", "pages show tokens as text", "stays",
          ("model_config", "kwargs")),
    Touch("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.__init__", "read (sliding_window, logits_soft_cap)",
          "tree rows see the layer's window and cap", "vLLM's CPU op takes a mask"),
    Touch("vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding",
          "called, the target's `model.embed_tokens`; its weight, or that of `lm_head`, and a rank's part of it are read",
          "a head reads the embedding without the scale of `embed_input_ids`", "stays"),
    Touch("vllm.model_executor.layers.logits_processor.LogitsProcessor", "read (soft_cap)",
          "a head's logits are not capped", "stays"),
    Touch("vllm.distributed.tensor_model_parallel_all_gather", "called",
          "the head's logits are put together like the target's", "stays", ("input_", "dim")),
    Touch("vllm.distributed.tensor_model_parallel_all_reduce", "called once",
          "every rank gets the rows of a draft vocabulary", "stays", ("input_",)),
    Touch("vllm.distributed.parallel_state.GroupCoordinator.broadcast_object", "called at start-up",
          "the first rank's costs hold for all", "stays", ("obj", "src")),
    Touch("vllm.config.CacheConfig", "copied for the head's layers, sliding_window cleared",
          "where all layers of a target have a window, vLLM gives it to every layer that names none", "stays"),
    Touch("vllm._custom_ops.create_onednn_mm", "called", "the head's layers use vLLM's packed product", "stays"),
    Touch("vllm._custom_ops.create_onednn_scaled_mm", "called", "feed-forward layers and draft LM head in 8 bits", "stays"),
    Touch("vllm._custom_ops.onednn_scaled_int8_quant", "called", "their inputs, a scale for each row", "stays"),
)  # fmt: skip

_FLASH = "vllm.v1.attention.backends.flash_attn"
CUDA_TOUCHES = (
    Touch("vllm.v1.worker.gpu_worker.Worker._make_model_runner", "overridden (CUDA)", "our runner in the place of vLLM's",
          "stays", ()),
    Touch("vllm.v1.worker.gpu_worker.Worker.init_device", "overridden (CUDA), calls super last",
          "our attention is in place before layers are built", "stays", ()),
    Touch(f"{_RUNNER}.initialize_kv_cache", "overridden (CUDA), calls super first",
          "buffers for kept K/V, the head's group", "stays",
          ("kv_cache_config", "is_profiling", "kv_cache_allocation_context")),
    Touch(f"{_FLASH}.FlashAttentionImpl.forward", "overridden (CUDA), calls super without trees",
          "tree rows take tree attention", "vLLM's kernels take a mask for each request"),
    Touch(f"{_FLASH}.FlashAttentionMetadataBuilder", "subclassed (CUDA): _cudagraph_support is NEVER",
          "attention stays outside of CUDA graphs", "that was tried on a GPU"),
    Touch("vllm.v1.attention.backends.fa_utils.is_flash_attn_varlen_func_available",
          "`flash_attn_varlen_func` behind it is called (CUDA)", "attention over the context with its log-sums", "stays", ()),
    Touch("vllm.v1.attention.backends.triton_attn.TritonAttentionImpl.forward", "overridden (CUDA), calls super without trees",
          "tree rows take tree attention", "vLLM's kernels take a mask for each request"),
    Touch("vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder",
          "subclassed (CUDA): _cudagraph_support is NEVER", "attention stays outside of CUDA graphs",
          "that was tried on a GPU"),
    Touch("vllm.utils.torch_utils.canonicalize_singleton_dim_strides", "called (CUDA)",
          "FlashAttention wants it of a cache with one K/V head", "stays"),
    Touch("vllm.v1.sample.sampler.Sampler.greedy_sample", "called (CUDA)", "the best token of every row", "stays", ("logits",)),
)  # fmt: skip

REPLICA_TOUCHES = (
    Touch("vllm.entrypoints.launchers.cli_args.make_arg_parser", "called", "a replica takes the flags of `vllm serve`", "stays",
          ("parser",)),
    Touch("vllm.entrypoints.launchers.app.build_app", "called", "a replica is vLLM's own OpenAI application", "stays",
          ("args", "supported_tasks", "model_config")),
    Touch("vllm.entrypoints.launchers.api_server.app_state.init_app_state", "called, and `state.server` set",
          "the same; on an engine's error vLLM's handler sets a flag of its HTTP server, which is Ray Serve's here", "stays",
          ("engine_client", "state", "args", "supported_tasks")),
    Touch("vllm.v1.metrics.ray_wrappers.RayPrometheusStatLogger", "handed to the engine, before vLLM's own",
          "Ray exports the numbers by replica; vLLM's own, made last, clears the registry first", "stays"),
)  # fmt: skip
"""Of replicas on Ray Serve alone: workers do not load vLLM's HTTP side to look."""


def check(touches: tuple[Touch, ...] | None = None) -> None:
    """Compare with the installed vLLM, `TOUCHES` unless others are given; raises `EagleError` naming the first difference."""
    for touch in TOUCHES if touches is None else touches:
        found = _resolve(touch.target)
        if touch.parameters is not None:
            got = tuple(name for name in inspect.signature(found).parameters if name not in ("self", "cls"))
            if got != touch.parameters:
                raise EagleError(f"{touch.target} takes ({', '.join(got)}) in this vLLM; install a supported release")


def _resolve(path: str) -> object:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for name in parts[cut:]:
                found = getattr(found, name)
        except AttributeError:
            break
        return inspect.unwrap(found) if callable(found) else found
    raise EagleError(f"{path} does not exist in this vLLM; install a supported release")


def table() -> str:
    """Return the ledger as a Markdown table."""
    rows = [
        f"| `{t.target.removeprefix('vllm.')}` | {t.how} | {t.why} | {t.until} |"
        for t in (*TOUCHES, *CUDA_TOUCHES, *REPLICA_TOUCHES)
    ]
    return "\n".join(["| in vLLM | how | why | until |", "|---|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")

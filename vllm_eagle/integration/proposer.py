"""The class behind `method="custom_class"`: it owns the head and its attention layers; the runner asks it for trees."""

from __future__ import annotations

import copy
import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_eagle.config import HEAD_DRAFTER
from vllm_eagle.drafting import Drafter, DraftVocabulary, HeadDrafter
from vllm_eagle.drafting.candidates import read_vocabulary
from vllm_eagle.errors import EagleError
from vllm_eagle.heads import AnyHead, Eagle3Head, load_head
from vllm_eagle.heads.checkpoint import check_folder
from vllm_eagle.integration.checks import check_config, check_worker, read_options
from vllm_eagle.integration.gemm import eight_bit_linear, use_packed_linears
from vllm_eagle.integration.parallel import plain_product, rows_of, shared_product
from vllm_eagle.names import WORKER

if TYPE_CHECKING:
    from vllm_eagle.integration.runner import TreeRunner


logger = logging.getLogger(__name__)


class TreeProposer:
    """Load the head before serving; a step's drafting is `drafter.draft`."""

    drafter: Drafter
    longest: int
    """Tokens of the longest request that is drafted for."""
    group: Any
    """vLLM's attention group of the head's layers."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Check everything that can be checked before weights load; raises `EagleError`."""
        check_worker(vllm_config)
        check_config(vllm_config)
        self.config, self.options = vllm_config, read_options(vllm_config)
        self.growth = self.options.growth()
        self.aux_layers = self._aux_layers()
        self.head: AnyHead | None = None
        self.layers: list[Attention] = []

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Refuse vLLM's own call: it passes no features and has no place for a tree."""
        raise EagleError(f"trees need our worker: add --worker-cls {WORKER}")

    def load_model(self, target: nn.Module) -> None:
        """Load the head and share the target's embedding and LM head."""
        if self.options.model is not None:
            device = next(target.parameters()).device
            self.head = load_head(self.options.folder, self.config.model_config.dtype).to(device)
            embed = self.head.share_embedding(target.model.embed_tokens)
            candidates = self._candidates(target, self.head)
            use_packed_linears(self.head)
            self.layers = self._attention_layers(self.head)
            drafter: Drafter | None = HeadDrafter(self.head, embed, candidates, self.growth)
        else:
            drafter = None
        if self.options.drafter != HEAD_DRAFTER:
            drafter = _load_class(self.options.drafter)(drafter, self.growth, **self.options.drafter_options)
        assert drafter is not None
        self.drafter = drafter
        self.longest = self._longest()
        embedding = "own" if self.head is not None and self.head.embed_tokens is not None else "the target's"
        words = "its own words" if self.aux_layers else self.options.vocabulary_file() or "the whole vocabulary"
        size, depth = self.growth.size, self.growth.depth
        what = "trees of up to %d nodes, %d levels; head %s with %s embedding, drafting from %s"
        logger.info(what, size, depth, self.options.model, embedding, words)

    def bind(self, runner: TreeRunner) -> None:
        """Find the attention group that serves the head's layers, once the runner has made its groups."""
        if self.layers:
            name = self.layers[0].layer_name
            self.group = next(g for groups in runner.attn_groups for g in groups if name in g.layer_names)

    def states(self, hidden_states: Tensor, aux_hidden_states: list[Tensor] | None) -> list[Tensor]:
        """Return the states [T, D] the head reads, side by side: what the LM head reads, or (EAGLE-3) inputs of layers."""
        if not self.aux_layers:
            return [hidden_states]
        assert aux_hidden_states is not None
        given = sorted(set(self.aux_layers))  # vLLM hands out each layer once, in order
        return [aux_hidden_states[given.index(layer)] for layer in self.aux_layers]

    def _aux_layers(self) -> tuple[int, ...]:
        """Return the target's layers whose inputs the head reads; none for EAGLE-1."""
        if self.options.model is None:
            return ()
        layers = self.config.model_config.get_num_layers(self.config.parallel_config)
        return check_folder(self.options.folder).reading(self.options.aux_layers).states_read(layers)

    def _longest(self) -> int:
        """Return the longest request to draft for: within its user's limit, and with no level beyond the head's positions."""
        limit, positions = self.config.model_config.max_model_len, self.head.config.max_positions if self.head else None
        longest = min(limit, self.options.max_context or limit)
        if positions is not None and positions - self.growth.depth < longest:
            longest = positions - self.growth.depth
            logger.warning("head %s has %d positions: longer requests go on without drafts", self.options.model, positions)
        return longest

    def _attention_layers(self, head: AnyHead) -> list[Attention]:
        """Make the head's layers known to vLLM: they get K/V blocks in the same tables as the target's."""
        c, parallel = head.config, self.config.parallel_config
        first = self.config.model_config.get_num_layers(parallel)
        cache_config = copy.copy(self.config.cache_config)
        cache_config.sliding_window = None  # the target's, where all its layers have one
        with set_current_vllm_config(self.config), set_default_torch_dtype(self.config.model_config.dtype):
            return [
                Attention(
                    c.num_heads,
                    c.head_dim,
                    c.head_dim**-0.5,
                    c.num_kv_heads,
                    cache_config=cache_config,
                    prefix=f"eagle_head.layers.{first + i}.self_attn.attn",
                )
                for i in range(c.num_layers)
            ]

    def _candidates(self, target: Any, head: AnyHead) -> DraftVocabulary:
        normed = head.normed
        if isinstance(head, Eagle3Head):
            product = shared_product(head.lm_head.weight.detach(), eight_bit_linear)
            del head.lm_head  # the product holds it
            words = None if head.vocabulary is None else head.vocabulary.to(next(target.parameters()).device)
            return DraftVocabulary(lambda features: product(normed(features)), words)
        file, size = self.options.vocabulary_file(), self.config.model_config.get_vocab_size()
        table = getattr(target, "lm_head", target.model.embed_tokens)  # Gemma-2 ties the two by having one
        if file is not None:
            tokens = read_vocabulary(Path(file), size).to(table.weight.device)
            rows = shared_product(rows_of(table, tokens), eight_bit_linear)
            return DraftVocabulary(lambda features: rows(normed(features)), tokens)
        if target.logits_processor.soft_cap is None:
            return DraftVocabulary(lambda features: target.compute_logits(normed(features)))
        uncapped = plain_product(table, size)  # as it was learnt
        return DraftVocabulary(lambda features: uncapped(normed(features)))


def _load_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as bad:
        raise EagleError(f"drafter {path!r} cannot be loaded ({bad}); want the dotted path of a class") from None

"""Put the pieces together: features to a fitted head, exported with its vocabulary and its card."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from vllm_eagle.config import Options
from vllm_eagle.errors import EagleError
from vllm_eagle.heads import AnyHead, Eagle3Head, HeadConfig, load_head, save_head
from vllm_eagle.train.batches import PackedBatch
from vllm_eagle.train.card import Provenance, write_card
from vllm_eagle.train.features import captured_layers, read_examples
from vllm_eagle.train.fit import Fit
from vllm_eagle.train.judge import judge
from vllm_eagle.train.processes import Team
from vllm_eagle.train.sampled import SampledVocabulary
from vllm_eagle.train.settings import Settings
from vllm_eagle.train.target import head_config
from vllm_eagle.train.vocabulary import frequent_tokens, write_vocabulary
from vllm_eagle.train.words import Ends, Words


@dataclass(frozen=True)
class Recipe:
    """Name all a fit needs: target, features to learn from and to be judged on, and where the head goes."""

    model: Path
    features: Sequence[Path]
    out: Path
    settings: Settings
    start: Path | None = None
    judge_on: Sequence[Path] = ()
    device: str = "cpu"


def fit_and_export(recipe: Recipe) -> str | None:
    """Fit a head and write it with its README.md to `out`/head; return one line of JSON.

    An EAGLE-1 head gets its list of tokens beside it, `draft_vocab.json`; an EAGLE-3 head has it inside. Of several
    processes the first one writes; the others return None.
    """
    settings, folder = recipe.settings, recipe.out / "head"
    team = Team.gather(recipe.device)
    layers = _aux_layers(recipe)
    examples = [example for source in recipe.features for example in read_examples(source, layers)]
    ends = Ends.load(recipe.model).to(str(team.device))
    ends.check(examples, layers)
    frequent = frequent_tokens(examples, len(ends.lm_head), settings.draft_vocabulary)
    start = load_head(recipe.start) if recipe.start else None
    if start is not None:
        start.share_embedding(lambda ids: ends.embedding[ids])
    eagle3 = settings.recipe == "eagle3"
    plan = _eagle3(recipe, ends, frequent, start, layers) if eagle3 else _eagle1(recipe, ends, frequent)
    fit = Fit(settings.fit, *plan, examples, recipe.out, partial(save_head, folder=folder), team, start)
    if team.leads:
        folder.mkdir(parents=True, exist_ok=True)
        if not eagle3:
            write_vocabulary(folder / "draft_vocab.json", frequent)
    fit.run()
    team.part()
    if not team.leads:
        return None
    judged = [judge(recipe.model, folder, source, Options(str(folder)).growth(), None) for source in recipe.judge_on]
    continued = "a head of an earlier stage" if recipe.start else ""
    write_card(folder, Provenance(recipe.model.name, examples, settings, continued), judged)
    lengths = [one.served.mean_length for one in judged]
    return json.dumps({"head": str(folder), "sequences": len(examples), "tree_length": lengths})


Plan = tuple[HeadConfig, Words, Callable[[PackedBatch, int], Words]]
"""The head's shape, the words it is judged over, and the words of a batch from a seed."""


def _eagle1(recipe: Recipe, ends: Ends, frequent: Tensor) -> Plan:
    """Borrow the target's LM head: the loss runs over a sample of the whole vocabulary, the list is for serving."""
    settings = recipe.settings
    config = head_config(recipe.model, settings.layers, settings.intermediate_size)
    sampled = SampledVocabulary(ends, frequent[: settings.always], settings.sample)
    return config, ends.words(frequent), sampled.words


def _eagle3(recipe: Recipe, ends: Ends, frequent: Tensor, start: AnyHead | None, layers: Sequence[int]) -> Plan:
    """Train an LM head over the draft vocabulary, the most frequent tokens or those of the head that is continued."""
    settings = recipe.settings
    words = ends.words(start.vocabulary if isinstance(start, Eagle3Head) else frequent.sort().values)
    config = head_config(recipe.model, settings.layers, settings.intermediate_size, len(words.lm_head), layers)
    return config, words, lambda batch, seed: words


def _aux_layers(recipe: Recipe) -> tuple[int, ...]:
    """Return the layers whose states the head reads: for `eagle3` those captured, which all folders must have in common."""
    if recipe.settings.recipe == "eagle1":
        return ()
    layers = captured_layers(recipe.features[0])
    if layers == ():
        raise EagleError(
            f"{recipe.features[0]} holds no states of inner layers, which recipe eagle3 reads; "
            f"capture into another folder with --aux-layers auto"
        )
    return layers or ()

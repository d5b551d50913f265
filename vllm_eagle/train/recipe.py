"""Put the pieces together: features to a fitted head, exported with its vocabulary and its card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_eagle.errors import EagleError
from vllm_eagle.heads import AnyHead, Eagle3Head, load_head, save_head
from vllm_eagle.train.card import Provenance, write_card
from vllm_eagle.train.features import Example, captured_layers, read_examples
from vllm_eagle.train.fit import Fit
from vllm_eagle.train.judge import judge
from vllm_eagle.train.sampled import SampledVocabulary
from vllm_eagle.train.settings import Settings
from vllm_eagle.train.target import head_config
from vllm_eagle.train.tree import TreeShape
from vllm_eagle.train.vocabulary import frequent_tokens, write_vocabulary
from vllm_eagle.train.words import Ends


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


def fit_and_export(recipe: Recipe) -> str:
    """Fit a head and write it with its README.md to `out`/head; return one line of JSON.

    An EAGLE-1 head gets its list of tokens beside it, `draft_vocab.json`; an EAGLE-3 head has it inside.
    """
    settings, folder = recipe.settings, recipe.out / "head"
    layers = _aux_layers(recipe)
    examples = [example for source in recipe.features for example in read_examples(source, layers)]
    ends = Ends.load(recipe.model).to(recipe.device)
    ends.check(examples, layers)
    start = load_head(recipe.start) if recipe.start else None
    folder.mkdir(parents=True, exist_ok=True)
    eagle3 = settings.recipe == "eagle3"
    fit = _eagle3(recipe, ends, examples, start, layers) if eagle3 else _eagle1(recipe, ends, examples, start)
    fit.run()
    judged = [judge(recipe.model, folder, source, TreeShape(), None) for source in recipe.judge_on]
    continued = "a head of an earlier stage" if recipe.start else ""
    write_card(folder, Provenance(recipe.model.name, examples, settings, continued), judged)
    return json.dumps({"head": str(folder), "sequences": len(examples), "tree_length": [one.tree_length for one in judged]})


def _eagle1(recipe: Recipe, ends: Ends, examples: Sequence[Example], start: AnyHead | None) -> Fit:
    """Borrow the target's LM head: the loss runs over a sample of the whole vocabulary, the list is for serving."""
    settings, folder = recipe.settings, recipe.out / "head"
    vocabulary = frequent_tokens(examples, len(ends.lm_head), settings.draft_vocabulary)
    write_vocabulary(folder / "draft_vocab.json", vocabulary)
    config = head_config(recipe.model, settings.layers, settings.intermediate_size)
    sampled = SampledVocabulary(ends, vocabulary[: settings.always], settings.sample)
    export = partial(save_head, folder=folder)
    return Fit(settings.fit, config, ends.words(vocabulary), sampled.words, examples, recipe.out, export, start)


def _eagle3(recipe: Recipe, ends: Ends, examples: Sequence[Example], start: AnyHead | None, layers: Sequence[int]) -> Fit:
    """Train an LM head over the draft vocabulary, the most frequent tokens or those of the head that is continued."""
    settings = recipe.settings
    frequent = frequent_tokens(examples, len(ends.lm_head), settings.draft_vocabulary)
    words = ends.words(start.vocabulary if isinstance(start, Eagle3Head) else torch.sort(frequent).values)
    config = head_config(recipe.model, settings.layers, settings.intermediate_size, len(words.lm_head), layers)
    export = partial(save_head, folder=recipe.out / "head")
    return Fit(settings.fit, config, words, lambda batch, seed: words, examples, recipe.out, export, start)


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

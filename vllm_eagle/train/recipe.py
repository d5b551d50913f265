"""Put the pieces together: features to a fitted head, exported with its vocabulary and its card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_eagle.config import Options
from vllm_eagle.heads import save_head
from vllm_eagle.train.card import Provenance, write_card
from vllm_eagle.train.features import read_examples
from vllm_eagle.train.fit import Fit
from vllm_eagle.train.judge import judge
from vllm_eagle.train.processes import Team
from vllm_eagle.train.sampled import SampledVocabulary
from vllm_eagle.train.settings import Settings
from vllm_eagle.train.target import head_config
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


def fit_and_export(recipe: Recipe) -> str | None:
    """Fit a head and write it with `draft_vocab.json` and README.md to `out`/head; return one line of JSON.

    Of several processes the first one writes; the others return None.
    """
    settings, folder = recipe.settings, recipe.out / "head"
    team = Team.gather(recipe.device)
    examples = [example for source in recipe.features for example in read_examples(source)]
    config = head_config(recipe.model, settings.layers, settings.intermediate_size)
    vocabulary = frequent_tokens(examples, config.vocab_size, settings.draft_vocabulary)
    ends = Ends.load(recipe.model).to(str(team.device))
    ends.check(examples)
    sampled = SampledVocabulary(ends, vocabulary[: settings.always], settings.sample)
    if team.leads:
        folder.mkdir(parents=True, exist_ok=True)
        write_vocabulary(folder / "draft_vocab.json", vocabulary)
    words = ends.words(vocabulary)
    export = lambda head: save_head(head, folder)  # noqa: E731
    Fit(settings.fit, config, words, sampled, examples, recipe.out, export, team, recipe.start).run()
    team.part()
    if not team.leads:
        return None
    judged = [judge(recipe.model, folder, source, Options(str(folder)).growth(), None) for source in recipe.judge_on]
    start = "a head of an earlier stage" if recipe.start else ""
    write_card(folder, Provenance(recipe.model.name, examples, settings, start), judged)
    lengths = [one.served.mean_length for one in judged]
    return json.dumps({"head": str(folder), "sequences": len(examples), "tree_length": lengths})

"""The model card of an exported head: data, recipe, acceptance, versions, licence."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_eagle.train.evaluate import Acceptance
from vllm_eagle.train.features import Example
from vllm_eagle.train.served import Served
from vllm_eagle.train.settings import Settings
from vllm_eagle.tree import Growth

_PACKAGES = ("torch", "transformers", "safetensors")

_DESCRIPTION = {
    "eagle1": """An EAGLE-1/2 draft head, original layout: {layers} decoder layer(s), no fusion bias, embedding and LM head
are the target's. `draft_vocab.json` lists the tokens the target uses most, most frequent first.""",
    "eagle3": """An EAGLE-3 draft head, original layout: one decoder layer over the inputs of three layers of the target, which
`config.json` names. The embedding is the target's, the LM head its own, with rows for the tokens the target uses most.""",
}


@dataclass(frozen=True)
class Judgement:
    """Hold what `evaluate` found on one set of answers."""

    name: str
    answers: int
    chain: Acceptance
    growth: Growth
    served: Served

    def lines(self) -> str:
        """Return a table of the acceptance by depth and the accepted lengths."""
        head = " | ".join(f"{n}-α" for n in range(len(self.chain.rates)))
        rates = " | ".join(f"{rate:.3f}" for rate in self.chain.rates)
        tree = f"served tree of {self.growth.size} nodes ({self.growth.depth} levels, top {self.growth.top_k})"
        return (
            f"| {self.name} | {head} | chain of {len(self.chain.rates)} | {tree} |\n"
            f"|{'---|' * (len(self.chain.rates) + 3)}\n"
            f"| {self.answers} answers | {rates} | {self.chain.mean_length:.2f} | {self.served.mean_length:.2f} |\n"
        )


@dataclass(frozen=True)
class Provenance:
    """Name what a head was made for, of which examples and with which settings, and the head it continues, if any."""

    target: str
    examples: Sequence[Example]
    settings: Settings
    start: str = ""


def write_card(folder: Path, about: Provenance, judged: Sequence[Judgement]) -> None:
    """Write README.md beside an exported head."""
    (folder / "README.md").write_text(_card(about, judged))


def _card(about: Provenance, judged: Sequence[Judgement]) -> str:
    target, examples, settings = about.target, about.examples, about.settings
    continued = f", continued from {about.start}" if about.start else ""
    tokens = sum(example.answer_length for example in examples)
    rounds = settings.fit.steps * settings.fit.batch_rounds
    recipe = "\n".join(f"{name} = {value!r}" for name, value in settings.effective().items())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    tables = "\n".join(one.lines() for one in judged) or "Not judged yet.\n"
    return f"""---
license: apache-2.0
base_model: {target}
---
# EAGLE head for {target}

{_DESCRIPTION[settings.recipe].format(layers=settings.layers)}

## Acceptance, from the head alone
{tables}
n-α is the share of drafts right at depth n of those right before it, on answers written greedily and not trained on, from
every position. The last column is the mean accepted length of serving those answers. Lengths count the target's own token.

## Data
{len(examples)} sequences, {tokens} answer tokens, written by the target itself at temperatures 0 and 0.8. No prompt of
MT-bench, Spec-Bench or HumanEval.

## Recipe
At least {rounds:,} training positions, each unrolled over the head's own outputs{continued}.

```toml
{recipe}
```

Versions: {versions}. Licence: Apache-2.0.
"""

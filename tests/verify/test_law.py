"""The law of the walk by exact enumeration: with processors that read history, whatever the drafter does.

Every draw branches into all tokens of a toy vocabulary, so probabilities are sums of products and no statistics are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_eagle.tree import DraftTree
from vllm_eagle.verify import STOPPED, walk

VOCAB, LENGTH = 3, 4
Text = tuple[int, ...]
Law = dict[Text, float]
Drafter = Callable[[Text], DraftTree]
Distribution = Callable[[Text, DraftTree, int], NDArray[np.float64]]


def processed(text: Sequence[int]) -> NDArray[np.float64]:
    """Return the target's distribution after `text`, with what a request may ask for: penalties, a bad word, min tokens."""
    logits = np.array([0.4, 0.1, -0.2]) + 0.7 * np.roll([0.0, 0.5, 1.0], sum(text) + len(text))
    logits -= 0.9 * np.bincount(np.array(text, int), minlength=VOCAB)  # frequency penalty
    logits[2] -= np.inf if text and text[-1] == 1 else 0.0  # the bad word 1 2
    logits[0] -= np.inf if len(text) < 2 else 0.0  # token 0 ends the text: not before two tokens
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


def unprocessed(text: Sequence[int]) -> NDArray[np.float64]:
    weights = np.exp(np.array([0.4, 0.1, -0.2]) + 0.7 * np.roll([0.0, 0.5, 1.0], sum(text) + len(text)))
    return weights / weights.sum()  # type: ignore[no-any-return]


def plain() -> Law:
    """Return the law of plain decoding."""
    law: Law = {(): 1.0}
    for _ in range(LENGTH):
        law = {(*text, t): p * q for text, p in law.items() for t, q in enumerate(processed(text)) if q > 0}
    return law


def with_trees(drafter: Drafter, distribution: Distribution) -> Law:
    """Return the law of decoding step by step with trees, every draw from `distribution(text, tree, row)`."""
    law: Law = {}
    unfinished: Law = {(): 1.0}
    while unfinished:
        text, chance = unfinished.popitem()
        if len(text) >= LENGTH:
            law[text[:LENGTH]] = law.get(text[:LENGTH], 0.0) + chance
            continue
        for emitted, probability in steps(text, drafter(text), distribution):
            longer = text + emitted
            unfinished[longer] = unfinished.get(longer, 0.0) + chance * probability
    return law


class Scripted:
    """Draw given tokens first, then the first possible one, and keep the distributions and the chance of it all."""

    def __init__(self, text: Text, tree: DraftTree, distribution: Distribution, script: Text) -> None:
        self.text, self.tree, self.distribution, self.script = text, tree, distribution, script
        self.asked: list[NDArray[np.float64]] = []
        self.chance = 1.0

    def __call__(self, rows: NDArray[np.int64], emitted: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        assert rows[0] != STOPPED
        now = self.distribution((*self.text, *emitted[0]), self.tree, int(rows[0]))
        level = len(self.asked)
        token = self.script[level] if level < len(self.script) else int(np.argmax(now > 0))
        self.asked.append(now)
        self.chance *= now[token]
        return np.array([token])


def steps(text: Text, tree: DraftTree, distribution: Distribution) -> list[tuple[Text, float]]:
    """Return every outcome of one walk, by walking again for each possible sequence of draws."""
    outcomes: list[tuple[Text, float]] = []
    scripts: list[Text] = [()]
    while scripts:
        draws = Scripted(text, tree, distribution, scripts.pop())
        emitted = tuple(walk([tree], [True], draws).emitted[0])
        outcomes.append((emitted, draws.chance))
        for level in range(len(draws.script), len(draws.asked)):  # the draws that were not scripted have siblings
            others = [t for t in np.flatnonzero(draws.asked[level] > 0).tolist() if t != emitted[level]]
            scripts += [(*emitted[:level], t) for t in others]
    return outcomes


def drafters() -> dict[str, Drafter]:
    wide = DraftTree.build([0, 0, 1, 2, 0, 1, 2, 1], [-1, 0, 0, 0, 2, 2, 3, 5])
    chain = DraftTree.build([0, 1, 1, 1], [-1, 0, 1, 2])

    def moody(text: Text) -> DraftTree:
        """Depend on the text so far, as a real drafter does."""
        first = sum(text) % VOCAB
        return DraftTree.build([0, first, (first + 1) % VOCAB, 1, 2], [-1, 0, 0, 1, 2])

    return {
        "none": lambda text: DraftTree.build([0], [-1]),
        "wide": lambda text: wide,
        "chain": lambda text: chain,
        "moody": moody,
    }


def distance(one: Law, two: Law) -> float:
    return max(abs(one.get(text, 0.0) - two.get(text, 0.0)) for text in {*one, *two})


@pytest.mark.parametrize("name", list(drafters()))
def test_the_law_is_plain_decodings(name: str) -> None:
    """Catches any bias, however small: the law of four tokens to 1e-12."""
    assert distance(with_trees(drafters()[name], lambda text, tree, row: processed(text)), plain()) < 1e-12


def test_a_bonus_token_without_processors_is_noticed() -> None:
    """A control: the test above must see processors that are missing at the last row only."""

    def careless(text: Text, tree: DraftTree, row: int) -> NDArray[np.float64]:
        return processed(text) if tree.children()[row] else unprocessed(text)

    assert distance(with_trees(drafters()["wide"], careless), plain()) > 1e-3


def test_penalties_over_siblings_are_noticed() -> None:
    """A control: history must be the ancestors, not the rows before."""

    def careless(text: Text, tree: DraftTree, row: int) -> NDArray[np.float64]:
        siblings = [int(tree.tokens[r]) for r in range(1, row) if tree.depths[r] == tree.depths[row]]
        weights = processed(text) * np.exp(-0.9 * np.bincount(np.array(siblings, int), minlength=VOCAB))
        return weights / weights.sum()  # type: ignore[no-any-return]

    assert distance(with_trees(drafters()["wide"], careless), plain()) > 1e-3


def test_a_policy_that_peeks_is_noticed() -> None:
    """A control: drawing again, once, when the first draw is not in the tree keeps more drafts and bends the law."""

    def careless(text: Text, tree: DraftTree, row: int) -> NDArray[np.float64]:
        now = processed(text)
        inside = np.zeros(VOCAB, bool)
        inside[[int(tree.tokens[child]) for child in tree.children()[row]]] = True
        if not inside.any():
            return now
        return np.where(inside, now, 0) + now[~inside].sum() * now  # type: ignore[no-any-return]

    assert distance(with_trees(drafters()["moody"], careless), plain()) > 1e-3

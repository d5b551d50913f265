"""Run the contestants, prompt by prompt in turn, and print what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_eagle.demo.prompts import PROMPTS
from vllm_eagle.heads.checkpoint import check_folder

if TYPE_CHECKING:
    from vllm_eagle.integration.session import Session


def show(model: Path, heads: Sequence[Path], *, tree_size: int, tree_depth: int, tokens: int, count: int) -> int:
    """Answer `count` prompts with all, stream the texts, print the table; return 0 if all texts are identical."""
    for head in heads:
        check_folder(head)
    from vllm_eagle.integration.session import Session

    print(f"starting plain vLLM and vLLM with trees (about {10 * (1 + len(heads))} seconds)", flush=True)
    plain = Contestant("plain vLLM", Session(model, tokens))
    shape = {"tree_size": tree_size, "tree_depth": tree_depth}
    trees = [
        Contestant(
            f"trees of {tree_size} nodes" + (f", {head.name}" if len(heads) > 1 else ""), Session(model, tokens, head, **shape)
        )
        for head in heads
    ]
    everyone = [plain, *trees]
    for one in everyone:
        one.session.answer("Hello!", limit=8)  # all warm
    identical, answered = 0, min(count, len(PROMPTS))
    for number, prompt in enumerate(PROMPTS[:count]):
        print(f"\n\033[1m{prompt}\033[0m", flush=True)
        turn = number % len(everyone)
        texts = [one.answer(prompt, aloud=one is trees[0]) for one in everyone[turn:] + everyone[:turn]]
        identical += all(text == texts[0] for text in texts)
    print(_table(everyone, identical, answered))
    return 0 if identical == answered else 1


@dataclass
class Contestant:
    """Add up what one engine took."""

    name: str
    session: Session
    seconds: float = 0.0
    written: int = 0
    answers: int = 0
    steps: int = 0

    def answer(self, prompt: str, aloud: bool) -> list[int]:
        """Answer one prompt, to the screen if aloud; return the ids."""
        answer = self.session.answer(prompt, on_text=_print if aloud else None)
        self.seconds += answer.seconds
        self.written += len(answer.ids)
        self.answers += 1
        self.steps += answer.steps
        return answer.ids


def _print(piece: str) -> None:
    print(piece, end="", flush=True)


def _table(everyone: Sequence[Contestant], identical: int, answered: int) -> str:
    wide = max(24, 2 + max(len(one.name) for one in everyone))
    first = everyone[0].written / everyone[0].seconds
    lines = [f"{'':{wide}}{'tokens/s':>10}{'ratio':>8}{'tokens per step':>18}"]
    for one in everyone:
        rate, length = one.written / one.seconds, (one.written - one.answers) / max(1, one.steps)
        lines.append(f"{one.name:{wide}}{rate:>10.1f}{rate / first:>8.2f}{length:>18.2f}")
    return "\n\n\n" + "\n".join([*lines, f"texts identical: {identical} of {answered}"]) + "\n"

"""Run both contestants, prompt by prompt in turn, and print what happened."""

from __future__ import annotations

import textwrap
from pathlib import Path

from vllm_eagle.demo.prompts import PROMPTS
from vllm_eagle.heads.checkpoint import check_folder


def show(model: Path, head: Path, *, tree_size: int, tree_depth: int, tokens: int, count: int) -> int:
    """Answer `count` prompts with both, stream the texts, print the table; return 0 if all texts are identical."""
    check_folder(head)
    from vllm_eagle.integration.session import Session

    print("starting plain vLLM and vLLM with trees (about 20 seconds)", flush=True)
    plain = Session(model, tokens)
    tree = Session(model, tokens, head=head, tree_size=tree_size, tree_depth=tree_depth)
    for session in (plain, tree):
        session.answer("Hello!", limit=8)  # both warm
    seconds, written = {plain: 0.0, tree: 0.0}, {plain: 0, tree: 0}
    identical, steps = 0, 0
    for number, prompt in enumerate(PROMPTS[:count]):
        print(f"\n\033[1m{prompt}\033[0m", flush=True)
        order = (plain, tree) if number % 2 == 0 else (tree, plain)
        texts = {}
        for session in order:
            answer = session.answer(prompt, on_text=_print if session is tree else None)
            seconds[session] += answer.seconds
            written[session] += len(answer.ids)
            steps += answer.steps if session is tree else 0
            texts[session] = answer.ids
        identical += texts[plain] == texts[tree]
    answered = min(count, len(PROMPTS))
    rates = [written[s] / seconds[s] for s in (plain, tree)]
    print(_table(rates, (written[tree] - answered) / max(1, steps), tree_size, identical, answered))
    return 0 if identical == answered else 1


def _print(piece: str) -> None:
    print(piece, end="", flush=True)


def _table(rates: list[float], accepted: float, tree_size: int, identical: int, answered: int) -> str:
    return textwrap.dedent(f"""

        {"":24}{"tokens/s":>10}{"ratio":>8}{"tokens per step":>18}
        {"plain vLLM":24}{rates[0]:>10.1f}{1:>8.2f}{1:>18.2f}
        {f"trees of {tree_size} nodes":24}{rates[1]:>10.1f}{rates[1] / rates[0]:>8.2f}{accepted:>18.2f}
        texts identical: {identical} of {answered}
    """)

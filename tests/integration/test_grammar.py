"""Structured output on trees (scenarios 53, 54, 55): masks by path, invalid nodes pruned, ids of plain decoding."""

from __future__ import annotations

import itertools
import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.integration.harness import counters, engine, generate, prompts, runner_of, since
from vllm_eagle import speculate
from vllm_eagle.integration.grammar import allowed_rows, masks
from vllm_eagle.testing import Half, Hostile, Oracle, tiny_head, tiny_target
from vllm_eagle.tree import DraftTree

OPEN, CLOSE, END, OTHER = range(4)


class Brackets:
    """The grammar of balanced brackets, then END."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def legal(self, token: int) -> bool:
        depth = self.taken.count(OPEN) - self.taken.count(CLOSE)
        return {OPEN: True, CLOSE: depth > 0, END: depth == 0, OTHER: False}[token]

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens if self.legal(tokens[0]) else []

    def accept_tokens(self, request: str, tokens: list[int]) -> bool:
        assert self.legal(tokens[0]) and not self.is_terminated()
        self.taken += tokens
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def is_terminated(self) -> bool:
        return END in self.taken

    def fill_bitmask(self, mask: torch.Tensor, row: int) -> None:
        mask[row, 0] = sum(1 << token for token in range(4) if self.legal(token))


def constrained_from(free: int) -> Any:
    """Make a manager whose requests reason for `free` more tokens before the grammar begins."""

    def bounds(request: Any, tokens: list[int]) -> Any:
        start = min(free, len(tokens) + 1)
        return SimpleNamespace(grammar_start=start, constraint_start=start)

    backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.zeros(rows, 1, dtype=torch.int32))
    return SimpleNamespace(_get_constraint_bounds=bounds, backend=backend)


def bracket_trees() -> list[DraftTree]:
    """Full trees over all four tokens, and one whose rows are not in depth-first order."""
    sizes = [(2, 4), (3, 3)]
    full = [[p for d in range(depth + 1) for p in itertools.product(range(width), repeat=d)] for depth, width in sizes]
    trees = []
    for paths in full:
        place = {path: row for row, path in enumerate(paths)}
        trees.append(DraftTree.build([9, *(p[-1] for p in paths[1:])], [-1, *(place[p[:-1]] for p in paths[1:])]))
    return trees


@pytest.mark.parametrize("free", [0, 1, 2])
@pytest.mark.parametrize("tree", bracket_trees(), ids=["wide", "deep"])
def test_every_row_is_judged_behind_its_own_ancestors(tree: DraftTree, free: int) -> None:
    """Catches siblings that see one another, a matcher not rolled back, and masks in another order than the rows."""

    def path(row: int) -> list[int]:
        return [] if row == 0 else [*path(int(tree.parents[row])), int(tree.tokens[row])]

    def judge(tokens: list[int]) -> tuple[bool, int]:
        """Walk one path alone: is it allowed, and which mask stands at its end?"""
        grammar = Brackets()
        for token in tokens[free:]:
            if grammar.is_terminated() or not grammar.legal(token):
                return False, 0
            grammar.taken.append(token)
        if len(tokens) < free or grammar.is_terminated():
            return True, -1
        return True, sum(1 << token for token in range(4) if grammar.legal(token))

    manager, grammar = constrained_from(free), Brackets()
    request: Any = SimpleNamespace(request_id="r", structured_output_request=SimpleNamespace(grammar=grammar))
    want = [row for row in range(len(tree.tokens)) if judge(path(row))[0]]
    assert allowed_rows(manager, request, tree) == want
    assert (len(want) < len(tree.tokens)) == (free < tree.depths.max())
    pruned = tree.subset(want)
    pruned.validate()
    other: Any = SimpleNamespace(request_id="s", structured_output_request=SimpleNamespace(grammar=Brackets()))
    mask = masks(manager, [other, request], {"r": pruned, "s": DraftTree.build([9], [-1])})
    first = -1 if free else 1 << OPEN | 1 << END
    assert mask[:, 0].tolist() == [first, *(judge(path(row))[1] for row in want)]
    assert grammar.taken == []


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "object": {"json_object": True},
    "regex": {"regex": r"[ab]{3,9}[0-9]{2}(x|yz)*"},
    "choice": {"choice": ["abba", "abab", "yes", "no", "12"]},
    "grammar": {"grammar": 'root ::= item ("," item)*\nitem ::= "a" | "b" | "(" root ")"'},
}
CALL = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TAG = {"structural_tag": json.dumps({"type": "structural_tag", "format": CALL})}
OLD_STYLE = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}
OLD_TAG = {"structural_tag": json.dumps({"type": "structural_tag", **OLD_STYLE})}
LARK = {"grammar": 'start: item ("," item)*\nitem: "a" | "b" | "(" start ")"'}
LENGTHS = [5, 31, 40, 33, 64, 7, 20]
TOKENS = 50


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM, list[SamplingParams]]:
    """Return plain decoding, trees, and one request of each kind the back end knows, some seeded, beside free ones."""
    folder = tmp_path_factory.mktemp("letters")
    target, head = tiny_target(folder / "target", vocab=300, letters=True), tiny_head(folder / "head", vocab=300)
    options = {"structured_outputs_config": {"backend": request.param, "disable_any_whitespace": True}}
    base = engine(target, **options)
    tree = engine(target, **options, **speculate(head, tree_size=34, tree_depth=5, tree_top_k=4))
    kinds = {**KINDS, "tag": TAG} if request.param == "xgrammar" else {**KINDS, "grammar": LARK, "tag": OLD_TAG}
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(**kind))
        for i, kind in enumerate(kinds.values())
    ]
    free = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return base, tree, [*params[:2], free, *params[2:]]


def test_ids_equal_plain_decoding(engines: tuple[LLM, LLM, list[SamplingParams]], caplog: pytest.LogCaptureFixture) -> None:
    """Catches a tree cut or masked as a chain, a matcher out of step with the text, and errors for drafts out of grammar."""
    base, tree, params = engines
    asked = prompts(LENGTHS[: len(params)])
    want = generate(base, asked, params)
    texts = [prompt + out for prompt, out in zip(asked, want, strict=True)]
    runner = runner_of(tree)
    head, growth = runner.drafter.drafter, runner.drafter.growth
    errors: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    options: dict[str, Any] = {"texts": texts, "width": 3, "vocab": 260}
    drafters = {
        "head": head,
        "oracle": Oracle(head, growth, depth=4, sibling=1, **options),
        "half": Half(head, growth, depth=4, sibling=2, right_depth=[4, 1, 0, 3], **options),
        "hostile": Hostile(head, growth, depth=5, texts=texts, width=6, tokens=[1, 62, 5, 129]),
    }
    seen = {}
    for name, drafter in drafters.items():
        runner.drafter.drafter = drafter
        before = counters(tree)
        assert generate(tree, asked, params) == want, name
        seen[name] = since(before, counters(tree))
    runner.drafter.drafter = head
    logging.getLogger("vllm").removeHandler(handler)
    assert errors == []
    # the oracle's right nodes survive pruning, the hostile ones do not even reach verification
    assert seen["oracle"]["accepted_tokens"] > 0.6 * sum(map(len, want))
    assert seen["hostile"]["draft_tokens"] < 0.8 * seen["hostile"]["drafts"] * 34


def test_output_is_of_the_grammar(engines: tuple[LLM, LLM, list[SamplingParams]]) -> None:
    """Catches a test of two engines that are wrong alike."""
    _, tree, params = engines
    out = tree.generate([{"prompt_token_ids": p} for p in prompts(LENGTHS[: len(params)])], params, use_tqdm=False)
    texts = [tree.get_tokenizer().decode(o.outputs[0].token_ids, skip_special_tokens=True) for o in out]
    assert len({*texts}) == len(texts)
    name = json.loads(texts[0])
    assert set(name) == {"name", "age"}
    assert re.fullmatch(KINDS["regex"]["regex"], texts[3]) or len(out[3].outputs[0].token_ids) == TOKENS
    assert texts[4] in KINDS["choice"]["choice"]


def test_masks_have_vllms_width(engines: tuple[LLM, LLM, list[SamplingParams]]) -> None:
    """Catches a mask type the workers cannot read."""
    manager = engines[1].llm_engine.engine_core.engine_core.scheduler.structured_output_manager
    mask = masks(manager, [], {})
    assert mask.dtype == np.int32 and mask.shape[1] == -(-300 // 32)


def test_55_streamed_pieces_are_the_whole(engines: tuple[LLM, LLM, list[SamplingParams]]) -> None:
    """Catches a stream that ends early or loses tokens when several arrive at once: thirty JSON requests."""
    plain, tree, _ = engines
    strings = {"type": "object", "properties": {name: {"type": "string", "maxLength": 5} for name in "ab"}}
    strings |= {"required": ["a", "b"], "additionalProperties": False}
    asked = prompts([3 + i for i in range(30)], 131)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=60, structured_outputs=StructuredOutputsParams(json=strings))
        for i in range(30)
    ]
    want = generate(plain, asked, params)
    core, pieces = tree.llm_engine, [[] for _ in asked]
    for i, (prompt, one) in enumerate(zip(asked, params, strict=True)):
        one.output_kind = RequestOutputKind.DELTA
        core.add_request(str(i), {"prompt_token_ids": prompt}, one)
    while core.has_unfinished_requests():
        for out in core.step():
            pieces[int(out.request_id)] += out.outputs[0].token_ids
    assert pieces == want
    for ids in pieces:
        if len(ids) < 60:
            assert set(json.loads(tree.get_tokenizer().decode(ids, skip_special_tokens=True), strict=False)) == {"a", "b"}
    assert sum(len(ids) < 60 for ids in pieces) > 20

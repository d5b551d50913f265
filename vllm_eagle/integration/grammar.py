"""Structured output on trees: each row's mask comes from the matcher's state after the row's own ancestors.

A grammar is stateful and lives with the scheduler. It walks the tree depth first, is advanced by a node's token on the
way down and rolled back on the way up, so that siblings never see one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_eagle.tree import DraftTree


def visit(manager: StructuredOutputManager, request: Request, tree: DraftTree) -> Iterator[tuple[int, bool]]:
    """Yield every row whose path the grammar allows, and whether the grammar constrains the token after it.

    While a row is yielded the matcher stands behind that row's token; afterwards it is where it was. Tokens before the
    end of a reasoning section are free, and the section may end inside the tree.
    """
    assert request.structured_output_request is not None
    grammar, children = request.structured_output_request.grammar, tree.children()
    assert grammar is not None

    def below(row: int, path: list[int]) -> Iterator[tuple[int, bool]]:
        yield row, manager._get_constraint_bounds(request, path).constraint_start <= len(path)
        for child in children[row]:
            token = int(tree.tokens[child])
            longer = [*path, token]
            if manager._get_constraint_bounds(request, longer).grammar_start > len(path):
                yield from below(child, longer)
            elif token >= 0 and not grammar.is_terminated() and grammar.validate_tokens([token]):
                grammar.accept_tokens(request.request_id, [token])
                yield from below(child, longer)
                grammar.rollback(1)

    return below(0, [])


def allowed_rows(manager: StructuredOutputManager, request: Request, tree: DraftTree) -> list[int]:
    """Return the rows [N'], ascending, that the grammar leaves of a tree; the root always stays."""
    return sorted(row for row, _ in visit(manager, request, tree))


def masks(manager: StructuredOutputManager, requests: Sequence[Request], trees: Mapping[str, DraftTree]) -> NDArray[np.int32]:
    """Return vLLM's bit masks [rows of all requests, V / 32], request by request, in row order; all ones: no constraint."""
    given = [trees[request.request_id] for request in requests]
    assert manager.backend is not None
    mask = manager.backend.allocate_token_bitmask(sum(len(tree.tokens) for tree in given)).fill_(-1)
    first = 0
    for request, tree in zip(requests, given, strict=True):
        assert request.structured_output_request is not None
        grammar = request.structured_output_request.grammar
        assert grammar is not None
        for row, constrained in visit(manager, request, tree):
            if constrained and not grammar.is_terminated():
                grammar.fill_bitmask(mask, first + row)
        first += len(tree.tokens)
    return mask.numpy()  # type: ignore[no-any-return]

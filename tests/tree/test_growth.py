"""Growth against brute force: the kept nodes are the best connected set, ties included."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from vllm_eagle.errors import TreeError
from vllm_eagle.tree import CandidatePool, DraftTree, DynamicGrowth, Growth, StaticGrowth, chain, read_static


def grow(growth: Growth, requests: int, seed: int, levels: int = 0) -> tuple[list[DraftTree], list[list[torch.Tensor]]]:
    """Grow with random log-probabilities on a grid (ties happen); tokens number the candidates."""
    generator = torch.Generator().manual_seed(seed)
    pool, offered = CandidatePool(growth, requests), []
    frontier = 1
    for level in range(growth.depth):
        if level:
            tokens, _ = pool.expand()
            frontier = tokens.shape[1]
        shape = (requests, frontier, growth.top_k)
        logprobs = -torch.randint(0, 3, shape, generator=generator).float().sort(dim=-1).values
        tokens = torch.arange(growth.top_k).expand(shape) + 100 * (level + 1)
        offered.append([tokens, logprobs])
        pool.add(tokens, logprobs, logprobs.exp())
    return pool.trees(torch.full((requests,), 7))[0], offered


@pytest.mark.parametrize(("size", "depth", "top_k"), [(1, 1, 1), (4, 4, 1), (25, 5, 8), (60, 6, 10), (63, 2, 8), (7, 3, 3)])
def test_dynamic_trees_are_trees(size: int, depth: int, top_k: int) -> None:
    """Catches an orphan: a child kept without its parent, when their values tie."""
    trees, _ = grow(DynamicGrowth(size, depth, top_k), requests=5, seed=size)
    for tree in trees:
        tree.validate()
        assert tree.size == min(size, top_k + (depth - 1) * top_k * min(top_k, top_k))
        assert tree.depths.max() <= depth
        for cut in range(tree.size):
            tree.prefix(cut).validate()


def test_dynamic_keeps_the_best() -> None:
    """Catches a rerank that is not the best set of its size: brute force over all connected sets of a small pool."""
    growth = DynamicGrowth(4, 2, 2)
    for seed in range(20):
        trees, offered = grow(growth, requests=1, seed=seed)
        first, second = offered[0][1][0, 0], offered[1][1][0]  # [2], [2, 2]
        order = first.topk(2).indices.tolist()
        values = {(i,): float(first[i]) for i in range(2)}
        values |= {(order[f], j): float(first[order[f]] + second[f, j]) for f in range(2) for j in range(2)}
        sets = [c for c in itertools.combinations(values, 4) if all(len(n) == 1 or n[:1] in c for n in c)]
        best = max(sum(map(values.__getitem__, c)) for c in sets)
        tokens, parents = trees[0].tokens, trees[0].parents
        kept = [
            (int(t) - 100,) if p == 0 else (int(tokens[p]) - 100, int(t) - 200)
            for t, p in zip(tokens[1:], parents[1:], strict=True)
        ]
        assert sum(values[node] for node in kept) == pytest.approx(best)


def test_a_chain_is_a_tree_of_width_one() -> None:
    """Catches a second code path for chains."""
    trees, _ = grow(chain(4), requests=2, seed=0)
    assert trees[0].parents.tolist() == [-1, 0, 1, 2, 3]


def test_static_places_every_path() -> None:
    """Catches a node hung from the wrong parent or carrying the wrong rank's token."""
    paths = [[0], [2], [0, 1], [2, 0], [2, 0, 2], [0, 1, 0]]
    (tree,), offered = grow(StaticGrowth(paths), requests=1, seed=3)
    tree.validate()
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3, 3]
    ranks = {row: (int(tree.tokens[row]) - 100 * int(tree.depths[row])) for row in range(1, 7)}
    found = set()
    for row in range(1, 7):
        path, at = [], row
        while at:
            path.append(ranks[at])
            at = int(tree.parents[at])
        found.add(tuple(reversed(path)))
    assert found == {tuple(path) for path in paths}
    assert len(offered) == 3


def test_shipped_trees(repository: Path) -> None:
    """Catches a configuration file that does not load; the paper's tree has level sizes 4/8/8/3/2."""
    sizes = {}
    for path in sorted((repository / "configs" / "tree").glob("*.json")):
        growth = read_static(path)
        sizes[path.stem] = [sum(len(p) == level for p in growth.paths) for level in range(1, growth.depth + 1)]
    assert sizes["eagle1_25"] == [4, 8, 8, 3, 2]
    assert sizes["chain_4"] == [1, 1, 1, 1]
    assert read_static(repository / "configs" / "tree" / "eagle1_25.json").scratch == 4 + 4 + 1 + 1  # nodes with children


@pytest.mark.parametrize(
    ("size", "depth", "top_k", "message"),
    [
        (0, 5, 8, "tree_size=0"),
        (64, 5, 8, "limit of 63"),
        (5, 0, 8, "tree_depth=0"),
        (5, 17, 1, "tree_depth=17"),
        (5, 5, 0, "tree_top_k=0"),
        (25, 9, 8, "expands 64 nodes"),
    ],
)
def test_limits(size: int, depth: int, top_k: int, message: str) -> None:
    """Catches a shape outside the limits that would fail later, inside a step."""
    with pytest.raises(TreeError, match=message):
        DynamicGrowth(size, depth, top_k)


BAD_TREES = [
    ("", "not valid JSON"),
    ("[[0]", "not valid JSON"),
    ("{}", "want a list of paths"),
    ("null", "want a list of paths"),
    ("3", "want a list of paths"),
    ("[0, 1]", "want a list of paths"),
    ('["0"]', "want a list of paths"),
    ('[["0"]]', "want a list of paths"),
    ("[[0.5]]", "want a list of paths"),
    ("[[true]]", "want a list of paths"),
    ("[]", "at least 1 path"),
    ("[[]]", r"path \[\]: want child ranks"),
    ("[[-1]]", r"path \[-1\]: want child ranks from 0"),
    ("[[0], [0, -2]]", r"path \[0, -2\]: want child ranks"),
    ("[[63]]", r"path \[63\]: want child ranks from 0 to 62"),
    ("[[0], [0, 99999999999999999999]]", r"path \[0, 9+\]: want child ranks"),
    ("[[0, 0]]", r"path \[0, 0\] has no parent \[0\]"),
    ("[[0], [0, 1], [0, 0, 0]]", r"path \[0, 0, 0\] has no parent \[0, 0\]"),
    ("[[0], [1], [0]]", r"path \[0\] is there twice"),
    ("[[0], [0, 1], [1], [0, 1]]", r"path \[0, 1\] is there twice"),
    (json.dumps([[0, *[i]] for i in range(63)] + [[0]]), "64 paths are over the limit of 63 nodes"),
    (json.dumps([[0] * depth for depth in range(1, 18)]), r"path \[(0, ){16}0\] is deeper than 16"),
]
"""A file's content, and what the error says of it."""

GOOD_TREES: list[list[list[int]]] = [
    [[0]],
    [[2]],
    [[62]],
    [[0], [1], [2], [3]],
    [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]],
    [[0, 0, 1], [1], [0, 0], [0]],  # in any order
    [[2], [0], [2, 1], [0, 3], [2, 1, 0]],
    [[0], [1], [0, 0], [1, 0], [1, 1], [0, 1]],
    [[i] for i in range(63)],
    [[0] * depth for depth in range(1, 17)],
]


@pytest.mark.parametrize(("content", "message"), BAD_TREES)
def test_74_bad_static_files(tmp_path: Path, content: str, message: str) -> None:
    """Catches a bad file reported without its name, the node and the rule, or accepted as another tree (scenario 74)."""
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(TreeError, match=rf"tree\.json.*{message}"):
        read_static(file)


@pytest.mark.parametrize("paths", GOOD_TREES)
def test_74_good_static_files(tmp_path: Path, paths: list[list[int]]) -> None:
    """Catches a good tree refused, or grown into another one (scenario 74)."""
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(paths))
    growth = read_static(file)
    assert (growth.size, growth.depth) == (len(paths), max(map(len, paths)))
    trees, _ = grow(growth, requests=2, seed=len(paths))
    for tree in trees:
        tree.validate()
        ranks: list[tuple[int, ...]] = [()]
        for row in range(1, tree.size + 1):
            ranks.append((*ranks[tree.parents[row]], int(tree.tokens[row]) - 100 * int(tree.depths[row])))
        assert sorted(ranks[1:]) == sorted(map(tuple, paths))

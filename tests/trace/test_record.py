from __future__ import annotations

from vllm_eagle.trace import Trace, TracedStep


def step(emitted: list[int], accepted: list[int]) -> TracedStep:
    nodes = max(accepted, default=0)
    return TracedStep(
        tokens=[7, *range(100, 100 + nodes)],
        parents=list(range(-1, nodes)),
        guesses=[1.0] + [0.5] * nodes,
        accepted=accepted,
        emitted=emitted,
        rows=1 + nodes,
        requests=1,
        draft_ms=1.0,
        verify_ms=2.0,
        commit_ms=0.5,
    )


TRACE = Trace("a", "target", "head", [step([1], []), step([2, 3, 4], [1, 2]), step([5, 6], [1])])


def written(trace: Trace) -> list[list[int]]:
    return [step.emitted for step in trace.steps]


def test_what_was_written_past_the_end_is_not_shown() -> None:
    """Catches tokens on the page that nobody got, and nodes called accepted whose tokens are not in the answer."""
    cut = TRACE.cut(3)
    assert written(cut) == [[1], [2, 3]]
    assert [step.accepted for step in cut.steps] == [[], [1, 2]]
    assert written(TRACE.cut(2)) == [[1], [2]]
    assert TRACE.cut(2).steps[1].accepted == [1]
    assert written(TRACE.cut(9)) == written(TRACE)


def test_an_answer_ends_at_its_first_stop_or_at_its_limit() -> None:
    """Catches a stop that is cut away itself, the last stop taken for the first, and a limit that is forgotten beside one."""
    assert written(TRACE.cut_at([6, 3], None)) == [[1], [2, 3]]
    assert written(TRACE.cut_at([3], 2)) == [[1], [2]]
    assert written(TRACE.cut_at([99], None)) == written(TRACE)
    assert written(TRACE.cut_at([], 4)) == [[1], [2, 3, 4]]


def test_every_token_shown_is_named() -> None:
    """Catches nodes that stand on the page as numbers."""
    assert TRACE.tokens() == {1, 2, 3, 4, 5, 6, 7, 100, 101}

"""A server that is told to end: last of its folder, since it ends the server the others use."""

from __future__ import annotations

from tests.serving.cases import Plain, end
from tests.serving.server import Server


def test_sigterm_while_requests_run(plain: Plain, trees: Server) -> None:
    """Catches a worker that outlives its server, a traceback of ours, and clients left hanging."""
    want, seen = plain.ending, end(trees)
    assert want is not None
    assert seen.status == want.status
    assert seen.left == want.left == []
    # whether vLLM's front end sees its engine die, and says so, is a race it has with and without trees
    assert not [line for line in seen.errors if "vllm_eagle" in line]
    assert "drafting failed" not in trees.log.read_text()
    for reader, answer in zip(seen.readers, plain.long, strict=True):
        written = answer.choices[0]["text"]
        shorter = min(len(reader.text), len(written))
        assert reader.text[:shorter] == written[:shorter] != ""

from __future__ import annotations

import pytest

from vllm_eagle.doctor import Level, machine

GIB = machine.GIB


def findings() -> dict[str, Level]:
    return {str(finding): finding.level for finding in machine.look()}


@pytest.mark.parametrize(
    ("flags", "level", "says"),
    [
        ({"avx512f", "avx512_vnni"}, Level.NOTE, "AVX-512, 8-bit products; no bf16 arithmetic"),
        ({"avx512f", "avx512_bf16", "amx_tile"}, Level.GOOD, "AVX-512, AMX; bf16 arithmetic"),
        ({"avx2"}, Level.NOTE, "AVX2; no bf16 arithmetic"),
        ({"sse2"}, Level.BAD, "neither AVX-512 nor AVX2"),
    ],
)
def test_instructions(flags: set[str], level: Level, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches bf16 recommended where it is emulated, and a processor vLLM cannot use called well."""
    monkeypatch.setattr(machine, "_flags", lambda: flags)
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    (line,) = [line for line in findings() if says in line]
    assert findings()[line] is level


def test_threads_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half a machine used without a word, and an OpenMP that is there but not preloaded."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(machine, "preload", lambda: "/lib/libiomp5.so")
    text = "\n".join(findings())
    assert "OMP_NUM_THREADS=1 on 4 usable cores" in text
    assert 'export LD_PRELOAD="/lib/libiomp5.so"' in text
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "4 usable cores" in "\n".join(line for line, level in findings().items() if level is Level.GOOD)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that is started and killed for memory."""
    monkeypatch.setattr(machine, "available_memory", lambda: 8 * GIB)
    assert machine.memory(2 * GIB, 4 * GIB).level is Level.GOOD
    assert machine.memory(4 * GIB, 4 * GIB).level is Level.BAD
    assert machine.memory(4 * GIB, None).level is Level.GOOD
    assert machine.memory(7 * GIB, None).level is Level.BAD

"""Kill a process of an offline engine while it writes: python -m tests.fuzz.killed FOLDER plain|trees TITLE.

TITLE is Worker. (EngineCore itself is not for a test: after its kill -9 plain vLLM 0.32 waits in `SyncMPClient.get_output`
for ever, with trees and without.)
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from pathlib import Path

import psutil


def main() -> None:
    """Write, be hit after a second of it, and say what the caller sees."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM, SamplingParams

    from tests.fuzz.server import PATIENCE, models
    from vllm_eagle import speculate

    folder, contestant, title = sys.argv[1:]
    target, head = models(Path(folder))
    extra = speculate(head, tree_size=12) if contestant == "trees" else {}
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8, **extra)
    family = psutil.Process().children(recursive=True)
    (victim,) = [child for child in family if title in " ".join(child.cmdline())]
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    threading.Timer(1, victim.kill).start()
    params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
    try:
        while True:
            llm.generate([{"prompt_token_ids": [70, 71]}] * 8, params, use_tqdm=False)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()

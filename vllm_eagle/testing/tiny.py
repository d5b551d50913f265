"""Tiny random models on disk: a Llama with a word-level tokenizer, and an EAGLE head that fits it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_eagle.heads import EagleHead, HeadConfig, save_head

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def tiny_target(
    folder: str | Path, *, vocab: int = 256, layers: int = 2, seed: int = 0, max_positions: int = 2048, damping: float = 1.0
) -> str:
    """Write a random Llama (hidden 64, 4 heads, 2 K/V heads of 32) with words w0, w1, ... and return the folder.

    With little `damping` the next token follows mostly from the last one alone, and `tiny_head(copies=True)` can guess it.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    for name, weight in model.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(damping)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bos, eos = (AddedToken(word, single_word=True, special=True) for word in ("w0", "w1"))  # else w1 is found in w17
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=bos, eos_token=eos, unk_token=bos)  # type: ignore[no-untyped-call]
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


def tiny_head(
    folder: str | Path,
    *,
    vocab: int = 256,
    hidden: int = 64,
    layers: int = 1,
    bias: bool = True,
    seed: int = 1,
    copies: bool = False,
    heads: tuple[int, int, int] = (4, 2, 32),
) -> str:
    """Write a random EAGLE-1 head that fits `tiny_target` and return the folder.

    `heads` are query heads, K/V heads and head size; the default is the target's own.

    With `copies` its fusion passes the token's embedding on: right about a damped target, now and then.
    """
    torch.manual_seed(seed)
    config = HeadConfig(
        hidden_size=hidden,
        intermediate_size=128,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        max_positions=2048,
        fusion_bias=bias,
        qkv_bias=False,
    )
    head = EagleHead(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.02 if copies else 0.08)
    if copies:
        head.fc.weight.data[:, :hidden] += torch.eye(hidden)
    save_head(head, folder, torch.float32)
    return str(folder)

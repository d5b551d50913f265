"""Tiny random models on disk: a Llama with a word-level tokenizer, and an EAGLE head that fits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from vllm_eagle.heads import Eagle3Head, EagleHead, HeadConfig, new_head, save_head

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def tiny_target(
    folder: str | Path,
    *,
    vocab: int = 256,
    layers: int = 2,
    hidden: int = 64,
    heads: tuple[int, int, int] = (4, 2, 32),
    seed: int = 0,
    max_positions: int = 2048,
    damping: float = 1.0,
    letters: bool = False,
    tied: bool = False,
) -> str:
    """Write a random Llama with words w0, w1, ... and return the folder; `heads` are query heads, K/V heads, head size.

    With `letters` its tokens are bytes and a few pairs of JSON instead, and <think> and </think> are tokens: what grammars
    and reasoning parsers want; `vocab` is then 300 or more. With little `damping` the next token follows mostly from the
    last one alone, and `tiny_head(copies=True)` can guess it.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.5,
        tie_word_embeddings=tied,
    )
    return write_target(config, folder, seed=seed, damping=damping, letters=letters)


def write_target(
    config: PretrainedConfig,
    folder: str | Path,
    *,
    seed: int = 0,
    damping: float = 1.0,
    embedding: float = 1.0,
    letters: bool = False,
) -> str:
    """Write a random model of any architecture with `tiny_target`'s tokenizer and return the folder.

    `damping` scales what layers add, `embedding` the table of embeddings: tied to the LM head, a large one repeats its token.
    """
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for name, weight in model.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(damping)
    model.get_input_embeddings().weight.data.mul_(embedding)
    model.save_pretrained(folder)
    fast = _letters() if letters else _words(config.vocab_size)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


def _words(vocab: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bos, eos = (AddedToken(word, single_word=True, special=True) for word in ("w0", "w1"))  # else w1 is found in w17
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=bos, eos_token=eos, unk_token=bos)  # type: ignore[no-untyped-call]


def _letters() -> PreTrainedTokenizerFast:
    special = ["<s>", "</s>", "<think>", "</think>"]
    pairs = [("{", '"'), ('"', ":"), ('"', ","), ('"', "}"), ("a", "b"), ("1", "2")]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in pairs]
    letters = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]


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
    draft_vocab: int | None = None,
    max_positions: int = 2048,
) -> str:
    """Write a random head that fits `tiny_target` and return the folder: EAGLE-1, or EAGLE-3 with a `draft_vocab` size.

    `heads` are query heads, K/V heads and head size; the default is the target's own.

    With `copies` the fusion of an EAGLE-1 head passes the token's embedding on: right about a damped target, now and then.
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
        max_positions=max_positions,
        fusion_bias=bias and draft_vocab is None,
        qkv_bias=False,
        draft_vocab_size=draft_vocab,
        aux_layers=() if draft_vocab is None else (0, 1, 1),
    )
    head = new_head(config)
    if isinstance(head, Eagle3Head):
        head.set_vocabulary(torch.randperm(vocab)[:draft_vocab].sort().values)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.02 if copies else 0.08)
    if copies and isinstance(head, EagleHead):
        head.fc.weight.data[:, :hidden] += torch.eye(hidden)
        if head.fc.bias is not None:
            head.fc.bias.data.zero_()  # a constant would outvote the embedding
    save_head(head, folder, torch.float32)
    return str(folder)

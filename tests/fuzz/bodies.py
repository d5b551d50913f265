"""Malformed requests by hand: each one sound except for what its name says."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.server import GOOD, JSON, NAME

Raw = tuple[str, str, bytes | None, dict[str, str]]
"""Method, path, body and headers."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "abba"}]
HUGE = 2**63

FIELDS: dict[str, dict[str, Any]] = {
    "no prompt": {"prompt": None},
    "empty prompt": {"prompt": ""},
    "empty list of prompts": {"prompt": []},
    "empty ids": {"prompt": [[]]},
    "prompt of ids that do not exist": {"prompt": [[5, 299, 300]]},
    "prompt of huge ids": {"prompt": [[HUGE]]},
    "prompt of negative ids": {"prompt": [[-1]]},
    "prompt of mixed kinds": {"prompt": ["a", 5]},
    "prompt too long": {"prompt": "ab" * 500},
    "prompt of a lone surrogate": {"prompt": "\ud800"},
    "prompt of zero bytes": {"prompt": "a\x00b"},
    "embeddings that are no tensor": {"prompt_embeds": "AAAA"},
    "unknown model": {"model": "other"},
    "model of a wrong kind": {"model": 5},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -1},
    "max_tokens huge": {"max_tokens": HUGE},
    "max_tokens a fraction": {"max_tokens": 1.5},
    "n 0": {"n": 0},
    "n negative": {"n": -1},
    "n huge": {"n": 10**9},
    "several greedy answers": {"n": 2, "temperature": 0},
    "temperature negative": {"temperature": -1},
    "temperature huge": {"temperature": 1e308, "seed": 1},
    "temperature tiny": {"temperature": 1e-300, "seed": 1},
    "top_p 0": {"top_p": 0},
    "top_p above 1": {"top_p": 1.5},
    "top_k negative": {"top_k": -5},
    "top_k huge": {"top_k": HUGE, "temperature": 1, "seed": 1},
    "min_p above 1": {"min_p": 2},
    "seed huge": {"seed": HUGE},
    "seed at the limit": {"seed": HUGE - 1, "temperature": 1},
    "seed at the lower limit": {"seed": -HUGE, "temperature": 1},
    "penalty out of range": {"frequency_penalty": 9},
    "repetition penalty 0": {"repetition_penalty": 0},
    "repetition penalty huge": {"repetition_penalty": 1e308},
    "logit_bias of an id that does not exist": {"logit_bias": {"300": 1}},
    "logit_bias of a negative id": {"logit_bias": {"-1": 1}},
    "logit_bias of a huge id": {"logit_bias": {str(HUGE): 1}},
    "logit_bias of a word": {"logit_bias": {"a": 1}},
    "logit_bias huge": {"logit_bias": {"70": 1e308}},
    "stop token that does not exist": {"stop_token_ids": [300], "min_tokens": 5},
    "stop token negative": {"stop_token_ids": [-1], "min_tokens": 5},
    "stop token huge": {"stop_token_ids": [2**40], "min_tokens": 5},
    "allowed token that does not exist": {"allowed_token_ids": [300]},
    "allowed token negative": {"allowed_token_ids": [-5]},
    "no allowed token": {"allowed_token_ids": []},
    "empty stop string": {"stop": ""},
    "stop of a wrong kind": {"stop": {"a": 1}},
    "min_tokens above max_tokens": {"min_tokens": 99},
    "min_tokens negative": {"min_tokens": -1},
    "bad word that is empty": {"bad_words": [""]},
    "bad words of a wrong kind": {"bad_words": [5]},
    "logprobs negative": {"logprobs": -2},
    "logprobs beyond the limit": {"logprobs": 11},
    "prompt_logprobs beyond the limit": {"prompt_logprobs": 10**9},
    "prompt_logprobs streamed": {"prompt_logprobs": 1, "stream": True},
    "logprob ids that do not exist": {"logprobs": 1, "logprob_token_ids": [300]},
    "logprob ids negative": {"logprobs": 1, "logprob_token_ids": [-1]},
    "truncation negative": {"truncate_prompt_tokens": -7},
    "truncation to nothing": {"truncate_prompt_tokens": 0},
    "truncation beyond the limit": {"truncate_prompt_tokens": 999},
    "beam search of one": {"use_beam_search": True, "n": 1, "max_tokens": 3},
    "beam search with a stream": {"use_beam_search": True, "n": 2, "stream": True},
    "stream options without a stream": {"stream_options": {"include_usage": True}},
    "priority without priorities": {"priority": 5},
    "salt that is empty": {"cache_salt": ""},
    "thinking budget without reasoning": {"thinking_token_budget": 5},
    "repetition of nothing": {"repetition_detection": {"max_pattern_size": 0, "min_pattern_size": 5, "min_count": 0}},
    "xargs of a wrong kind": {"vllm_xargs": {"a": {"b": 1}}},
    "unknown field": {"speculative_model": "x", "tree_size": 5},
    "grammar: regex that does not parse": {"structured_outputs": {"regex": "((("}},
    "grammar: regex that is empty": {"structured_outputs": {"regex": ""}},
    "grammar: regex of a bomb": {"structured_outputs": {"regex": "(a{1,99}){1,99}{1,99}x"}},
    "grammar: json that is no schema": {"structured_outputs": {"json": {"type": "nothing"}}},
    "grammar: json that is no JSON": {"structured_outputs": {"json": "{"}},
    "grammar: json that refers to itself": {"structured_outputs": {"json": {"$ref": "#"}}},
    "grammar: json that refers to nothing": {"structured_outputs": {"json": {"$ref": "#/nothing"}}},
    "grammar: rules that do not parse": {"structured_outputs": {"grammar": "root ::= ("}},
    "grammar: rules without a root": {"structured_outputs": {"grammar": 'a ::= "b"'}},
    "grammar: no choice": {"structured_outputs": {"choice": []}},
    "grammar: an empty choice": {"structured_outputs": {"choice": [""]}},
    "grammar: two at once": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "grammar: none": {"structured_outputs": {}},
    "grammar: unknown kind": {"structured_outputs": {"lark": "a"}},
    "grammar: tag that is none": {"structured_outputs": {"structural_tag": "{}"}},
    "grammar: format without a schema": {"response_format": {"type": "json_schema"}},
    "grammar: only tokens that are not allowed": {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [70]},
    "grammar: only tokens that are bad words": {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]},
    "grammar: only tokens that are biased away": {"structured_outputs": {"choice": ["a"]}, "logit_bias": {"68": -100}},
}
"""Merged into a good completion request."""

CHATS: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "messages of a wrong kind": {"messages": "abba"},
    "message without a role": {"messages": [{"content": "a"}]},
    "message of an unknown role": {"messages": [{"role": "nobody", "content": "a"}]},
    "message without content": {"messages": [{"role": "user"}]},
    "message of an unknown part": {"messages": [{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}]},
    "message with an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "top_logprobs beyond the limit": {"logprobs": True, "top_logprobs": 99},
    "tool choice without tools": {"tool_choice": "required"},
    "tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "tool of a broken schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "template that does not parse": {"chat_template": "{% for"},
    "continuing and beginning at once": {"continue_final_message": True, "add_generation_prompt": True},
}
"""Merged into a good chat request."""

GOOD_CHAT = {key: value for key, value in GOOD.items() if key != "prompt"} | {"messages": MESSAGES}
_SOUND = json.dumps(GOOD).encode()
OTHERS: dict[str, Raw] = {
    "no body": ("POST", COMPLETIONS, None, JSON),
    "empty body": ("POST", COMPLETIONS, b"", JSON),
    "cut body": ("POST", COMPLETIONS, _SOUND[:-5], JSON),
    "body that is a list": ("POST", COMPLETIONS, b"[]", JSON),
    "body that is a number": ("POST", COMPLETIONS, b"5", JSON),
    "body that is null": ("POST", COMPLETIONS, b"null", JSON),
    "body that is no text": ("POST", COMPLETIONS, b"\xff\xfe\x00", JSON),
    "body of nested lists": ("POST", COMPLETIONS, b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", JSON),
    "not a number": ("POST", COMPLETIONS, _SOUND.replace(b'"temperature": 0', b'"temperature": NaN'), JSON),
    "infinity": ("POST", COMPLETIONS, _SOUND.replace(b'"temperature": 0', b'"temperature": Infinity'), JSON),
    "bias that is not a number": ("POST", COMPLETIONS, _SOUND[:-1] + b', "logit_bias": {"70": NaN}}', JSON),
    "bias that is infinite": ("POST", COMPLETIONS, _SOUND[:-1] + b', "logit_bias": {"70": -Infinity}}', JSON),
    "a key twice": ("POST", COMPLETIONS, _SOUND[:-1] + b', "n": 0, "n": 1}', JSON),
    "wrong type of content": ("POST", COMPLETIONS, _SOUND, {"Content-Type": "text/plain"}),
    "no type of content": ("POST", COMPLETIONS, _SOUND, {}),
    "false length": ("POST", COMPLETIONS, _SOUND, JSON | {"Content-Length": "x"}),
    "wrong method": ("GET", COMPLETIONS, None, JSON),
    "wrong path": ("POST", COMPLETIONS + "/x", _SOUND, JSON),
    "tokens that do not exist": ("POST", "/detokenize", json.dumps({"model": NAME, "tokens": [300, HUGE]}).encode(), JSON),
    "tokens that are negative": ("POST", "/detokenize", json.dumps({"model": NAME, "tokens": [-1]}).encode(), JSON),
}


def malformed() -> dict[str, Raw]:
    """Return all of them by name."""
    found = {
        f"{path}: {name}": ("POST", path, json.dumps(good | fields).encode(), JSON)
        for path, good, changes in ((COMPLETIONS, GOOD, FIELDS), (CHAT, GOOD_CHAT, CHATS))
        for name, fields in changes.items()
    }
    return found | OTHERS

"""The page: one HTML file without links to others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files

from vllm_eagle.trace.record import Trace


def page(trace: Trace, words: Mapping[int, str]) -> str:
    """Return the whole page; `words` gives each token as text. What it shows stands in it as JSON, too."""
    told = dataclasses.asdict(trace) | {"words": {str(token): words[token] for token in sorted(trace.tokens())}}
    data = json.dumps(told).replace("<", "\\u003c")  # no text of a model may end the script it stands in
    template = files("vllm_eagle.trace").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("{{title}}", escape(trace.request)).replace("{{trace}}", data)

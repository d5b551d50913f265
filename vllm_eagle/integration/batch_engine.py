"""Answer rows with an engine whose batch is kept full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.plugins import load_general_plugins
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_eagle.batch.results import Results
from vllm_eagle.batch.rows import BadRow, Row, name, parse
from vllm_eagle.errors import EagleError
from vllm_eagle.train.progress import Progress

_TYPES = {"structured_outputs": StructuredOutputsParams}
_OURS = {"output_kind"}
"""Parameters that are not a row's to choose."""


def answer(flags: list[str], rows: Iterable[tuple[int, bytes]], total: int, results: Results) -> None:
    """Answer all rows that have no result yet; raises `EagleError` for flags vLLM does not take."""
    progress = Progress("rows", total, len(results.places))
    failed = 0
    for index, result in answers(engine(flags), (row for row in rows if row[0] not in results.places)):
        results.add(index, result)
        failed += "error" in result
        tokens = sum(one["tokens"] for one in result.get("outputs", ()))
        progress.add(tokens, note=f" · {failed} failed" if failed else "")


def answers(llm: LLM, rows: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row's index and result as it ends; a row that cannot be answered has an `error`."""
    most = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs  # the next ones wait at the door
    running: dict[str, Row] = {}
    todo = iter(rows)
    while True:
        while len(running) < most and (next_row := next(todo, None)) is not None:
            index, line = next_row
            try:
                row = parse(index, line)
                _submit(llm, row)
            except (BadRow, VLLMValidationError, ValueError, TypeError) as wrong:  # the last three are how vLLM refuses
                yield index, {"id": name(line), "error": " ".join(str(wrong).split())}
                continue
            running[str(index)] = row
        if not running:
            break
        for output in llm.llm_engine.step():
            if output.finished:
                row = running.pop(output.request_id)
                yield row.index, _result(row, output)


def engine(flags: list[str]) -> LLM:
    """Start an engine from flags of `vllm serve`; raises `EagleError` for flags it does not take."""
    load_general_plugins()  # our flags among them
    parser = FlexibleArgumentParser(prog="vllm-eagle batch IN OUT", exit_on_error=False)
    EngineArgs.add_cli_args(parser)

    def refuse(message: str) -> None:
        raise EagleError(f"{message}; flags behind IN and OUT are those of vllm serve")

    parser.error = refuse
    args = EngineArgs.from_cli_args(parser.parse_args(flags))
    return LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})


def _submit(llm: LLM, row: Row) -> None:
    known = set(SamplingParams.__struct_fields__) - _OURS
    if unknown := sorted(key for key in row.parameters if key not in known or key.startswith("_")):
        raise BadRow(f"unknown parameter {', '.join(unknown)}; want prompt or messages, id, and vLLM's sampling parameters")
    values = {key: _TYPES[key](**value) if key in _TYPES else value for key, value in row.parameters.items()}
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **values)
    llm.llm_engine.add_request(str(row.index), _prompt(llm, row), params)


def _prompt(llm: LLM, row: Row) -> Any:
    if row.messages is not None:
        template = llm.get_tokenizer().apply_chat_template
        try:
            tokens = template(row.messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as wrong:  # whatever a model's template raises is about this row alone
            raise BadRow(f"messages: the chat template does not take them ({wrong})") from None
        return {"prompt_token_ids": tokens}
    return {"prompt_token_ids": row.prompt} if isinstance(row.prompt, list) else row.prompt


def _result(row: Row, output: Any) -> dict[str, Any]:
    outputs = [{"text": one.text, "finish_reason": one.finish_reason, "tokens": len(one.token_ids)} for one in output.outputs]
    return {"id": row.id, "prompt_tokens": len(output.prompt_token_ids), "outputs": outputs}

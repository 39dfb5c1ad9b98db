"""Schemas of requests to the Responses API."""

from __future__ import annotations

from typing import Final

from .common import IGNORED_SERVICE, JSON_SCHEMA, LIMIT, SAMPLING
from .shapes import (
    FLAG,
    JSON_OBJECT,
    PARSED,
    REFUSAL,
    TEXT,
    Schema,
    array,
    either,
    integer,
    one_of,
    record,
    ref,
)

_ITEM: Final[dict[str, Schema]] = {"id": TEXT, "status": one_of("completed", "incomplete", "in_progress")}
_NAMED: Final[Schema] = record({"type": one_of("function"), "name": TEXT}, required=("type", "name"))
_EMPTY: Final[Schema] = {"type": "array", "maxItems": 0}

RESPONSES: Final[dict[str, Schema]] = {
    **SAMPLING,
    **IGNORED_SERVICE,
    "model": TEXT,
    "input": either(TEXT, array(ref("ResponsesItem"), least=1)),
    "instructions": TEXT,
    "stream": FLAG,
    "stream_options": record({"include_obfuscation": one_of(False)}),
    "max_output_tokens": LIMIT,
    "previous_response_id": TEXT,
    "store": FLAG,
    "include": array(one_of("message.output_text.logprobs")),
    "top_logprobs": integer(0, 20),
    "text": record(
        {
            "verbosity": one_of("medium"),
            "format": either(
                record({"type": one_of("text", "json_object")}, required=("type",)),
                record(
                    {
                        "type": one_of("json_schema"),
                        "name": TEXT,
                        "description": TEXT,
                        "schema": JSON_SCHEMA,
                        "strict": FLAG,
                    },
                    required=("type", "name", "schema"),
                ),
            ),
        }
    ),
    "tools": array(ref("ResponsesTool"), most=128),
    "tool_choice": either(
        one_of("none", "auto", "required"),
        _NAMED,
        record(
            {
                "type": one_of("allowed_tools"),
                "mode": one_of("auto", "required"),
                "tools": array(_NAMED, least=1),
            },
            required=("type", "mode", "tools"),
        ),
    ),
    "parallel_tool_calls": FLAG,
    "reasoning": record({"effort": TEXT}),
    "reasoning_format": one_of("none", "auto", "deepseek"),
    "chat_template_kwargs": JSON_OBJECT,
    "background": one_of(False),
    "truncation": one_of("disabled"),
    "user": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": one_of("in_memory", "24h"),
}

SCHEMAS: Final[dict[str, Schema]] = {
    "Responses": record(RESPONSES, required=("model", "input")),
    "ResponsesItem": either(
        record(
            {
                **_ITEM,
                "type": one_of("message"),
                "role": one_of("user", "system", "developer", "assistant"),
                "content": either(TEXT, array(ref("ResponsesPart"))),
                "phase": one_of("commentary", "final_answer"),
            },
            required=("role", "content"),
        ),
        record(
            {
                **_ITEM,
                "type": one_of("function_call"),
                "call_id": TEXT,
                "name": TEXT,
                "arguments": TEXT,
                "parsed_arguments": PARSED,
            },
            required=("type", "call_id", "name", "arguments"),
        ),
        record(
            {
                **_ITEM,
                "type": one_of("reasoning"),
                "summary": _EMPTY,
                "content": array(
                    record({"type": one_of("reasoning_text"), "text": TEXT}, required=("type", "text"))
                ),
            },
            required=("type",),
        ),
        record(
            {
                **_ITEM,
                "type": one_of("function_call_output"),
                "call_id": TEXT,
                "output": either(TEXT, array(ref("ResponsesPart"))),
            },
            required=("type", "call_id", "output"),
        ),
    ),
    "ResponsesPart": either(
        record(
            {
                "type": one_of("input_text", "output_text", "text"),
                "text": TEXT,
                "annotations": _EMPTY,
                "logprobs": array(JSON_OBJECT),
                "parsed": PARSED,
            },
            required=("type", "text"),
        ),
        REFUSAL,
    ),
    "ResponsesTool": record(
        {
            "type": one_of("function"),
            "name": TEXT,
            "description": TEXT,
            "parameters": JSON_SCHEMA,
            "strict": FLAG,
        },
        required=("type", "name"),
    ),
}

"""Schemas of chat requests, whole and for their prompt alone."""

from __future__ import annotations

from typing import Final

from .common import ANSWERING, IGNORED_SERVICE, JSON_SCHEMA, LIMIT
from .shapes import (
    FLAG,
    JSON_OBJECT,
    PARSED,
    REFUSAL,
    TEXT,
    Schema,
    array,
    described,
    either,
    integer,
    one_of,
    record,
    ref,
)

_EMPTY: Final[Schema] = {"type": "array", "maxItems": 0}

_SAID: Final[dict[str, Schema]] = {
    "content": either(TEXT, array(ref("ChatTextPart"))),
    "name": TEXT,
    "annotations": _EMPTY,
}
_FUNCTION: Final[Schema] = record(
    {"name": TEXT, "description": TEXT, "parameters": JSON_SCHEMA, "strict": FLAG}, required=("name",)
)
_CHOSEN: Final[Schema] = record(
    {"type": one_of("function"), "function": record({"name": TEXT}, required=("name",))},
    required=("type", "function"),
)

PROMPT: Final[dict[str, Schema]] = {
    "messages": array(ref("ChatMessage"), least=1),
    "tools": array(ref("ChatTool"), most=128),
    "tool_choice": either(
        one_of("none", "auto", "required"),
        _CHOSEN,
        record(
            {
                "type": one_of("allowed_tools"),
                "allowed_tools": record(
                    {"mode": one_of("auto", "required"), "tools": array(_CHOSEN, least=1)},
                    required=("mode", "tools"),
                ),
            },
            required=("type", "allowed_tools"),
        ),
    ),
    "parallel_tool_calls": FLAG,
    "functions": _EMPTY,
    "function_call": one_of("none", "auto"),
    "prefill_assistant": described("An assistant's last message is how the answer begins.", FLAG),
    "chat_template": TEXT,
    "chat_template_kwargs": JSON_OBJECT,
    "reasoning_effort": TEXT,
    "reasoning_format": one_of("none", "auto", "deepseek"),
}
"""Parameters that the prompt depends on."""

CHAT: Final[dict[str, Schema]] = {
    **ANSWERING,
    **PROMPT,
    "max_completion_tokens": LIMIT,
    "logprobs": FLAG,
    "top_logprobs": integer(0, 20),
    "modalities": one_of(["text"]),
    "verbosity": one_of("medium"),
    "store": one_of(False),
    **IGNORED_SERVICE,
}

SCHEMAS: Final[dict[str, Schema]] = {
    "Chat": record(CHAT, required=("model", "messages")),
    "ApplyTemplate": record({**CHAT}, required=("messages",)),
    "ChatMessage": either(
        record({"role": one_of("system", "developer", "user"), **_SAID}, required=("role", "content")),
        record(
            {
                "role": one_of("assistant"),
                **_SAID,
                "content": either(TEXT, array(either(ref("ChatTextPart"), REFUSAL))),
                "refusal": TEXT,
                "parsed": PARSED,
                "tool_calls": array(ref("ChatToolCall")),
                "reasoning_content": described("What the model thought before it answered.", TEXT),
            },
            required=("role",),
        ),
        record(
            {"role": one_of("tool"), **_SAID, "tool_call_id": TEXT},
            required=("role", "content", "tool_call_id"),
        ),
    ),
    "ChatTextPart": record({"type": one_of("text"), "text": TEXT}, required=("type", "text")),
    "ChatTool": record({"type": one_of("function"), "function": _FUNCTION}, required=("type", "function")),
    "ChatToolCall": record(
        {
            "id": TEXT,
            "type": one_of("function"),
            "index": integer(0, 128),
            "function": record(
                {"name": TEXT, "arguments": TEXT, "parsed_arguments": PARSED}, required=("name",)
            ),
        },
        required=("id", "function"),
    ),
}

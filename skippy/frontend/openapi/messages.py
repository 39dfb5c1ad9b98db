"""Schemas of requests to Anthropic's Messages API."""

from __future__ import annotations

from typing import Final

from .common import JSON_SCHEMA, LIMIT, SAMPLING
from .shapes import FLAG, JSON_OBJECT, TEXT, Schema, array, either, number, one_of, record, ref

_CACHED: Final[dict[str, Schema]] = {
    "cache_control": record({"type": one_of("ephemeral"), "ttl": one_of("5m", "1h")})
}
_TEXTS: Final[Schema] = either(TEXT, array(ref("MessagesText")))

PROMPT: Final[dict[str, Schema]] = {
    **_CACHED,
    "model": TEXT,
    "messages": array(ref("MessagesMessage"), least=1),
    "system": _TEXTS,
    "tools": array(ref("MessagesTool"), most=128),
    "tool_choice": record(
        {
            "type": one_of("auto", "any", "none", "tool"),
            "name": TEXT,
            "disable_parallel_tool_use": FLAG,
        },
        required=("type",),
    ),
    "thinking": record({"type": one_of("disabled")}, required=("type",)),
    "output_config": record(
        {
            "effort": TEXT,
            "format": record(
                {"type": one_of("json_schema"), "schema": JSON_SCHEMA}, required=("type", "schema")
            ),
        }
    ),
}
"""What the prompt is made of."""

SCHEMAS: Final[dict[str, Schema]] = {
    "Messages": record(
        {
            **SAMPLING,
            **PROMPT,
            "temperature": number(0, 1),
            "max_tokens": LIMIT,
            "stream": FLAG,
            "stop_sequences": array({"type": "string", "minLength": 1, "maxLength": 1024}, most=16),
            "metadata": record({"user_id": TEXT}),
            "service_tier": one_of("auto", "standard_only"),
            "speed": one_of("standard"),
        },
        required=("model", "max_tokens", "messages"),
    ),
    "CountTokens": record(PROMPT, required=("model", "messages")),
    "MessagesMessage": record(
        {
            "role": one_of("user", "assistant", "system"),
            "content": either(TEXT, array(ref("MessagesBlock"))),
        },
        required=("role", "content"),
    ),
    "MessagesBlock": either(
        ref("MessagesText"),
        record(
            {
                **_CACHED,
                "type": one_of("tool_use"),
                "id": TEXT,
                "name": TEXT,
                "input": JSON_OBJECT,
                "caller": one_of({"type": "direct"}),
            },
            required=("type", "id", "name", "input"),
        ),
        record(
            {
                **_CACHED,
                "type": one_of("tool_result"),
                "tool_use_id": TEXT,
                "content": _TEXTS,
                "is_error": FLAG,
            },
            required=("type", "tool_use_id"),
        ),
        record(
            {"type": one_of("thinking"), "thinking": TEXT, "signature": TEXT}, required=("type", "thinking")
        ),
    ),
    "MessagesText": record(
        {**_CACHED, "type": one_of("text"), "text": TEXT, "citations": {"type": "array", "maxItems": 0}},
        required=("type", "text"),
    ),
    "MessagesTool": record(
        {
            **_CACHED,
            "type": one_of("custom"),
            "name": TEXT,
            "description": TEXT,
            "input_schema": JSON_SCHEMA,
            "strict": FLAG,
            "eager_input_streaming": FLAG,
            "defer_loading": one_of(False),
            "allowed_callers": one_of(["direct"]),
        },
        required=("name", "input_schema"),
    ),
}

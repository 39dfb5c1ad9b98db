"""Schemas of answers: the members that clients rely on."""

from __future__ import annotations

from typing import Final

from .shapes import ANYTHING, FLAG, JSON_OBJECT, TEXT, Schema, answer, array, either, integer, one_of

_COUNT: Schema = integer(0)
_MAYBE: Schema = either(TEXT, {"type": "null"})
_USAGE: Schema = answer({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT})

ANSWERS: Final[dict[str, Schema]] = {
    "ChatCompletion": answer(
        {
            "id": TEXT,
            "object": one_of("chat.completion"),
            "created": _COUNT,
            "model": TEXT,
            "choices": array(answer({"index": _COUNT, "message": JSON_OBJECT, "finish_reason": TEXT})),
            "usage": _USAGE,
        }
    ),
    "TextCompletion": answer(
        {
            "id": TEXT,
            "object": one_of("text_completion"),
            "created": _COUNT,
            "model": TEXT,
            "choices": array(answer({"index": _COUNT, "text": TEXT, "finish_reason": TEXT})),
            "usage": _USAGE,
        }
    ),
    "Response": answer(
        {
            "id": TEXT,
            "object": one_of("response"),
            "created_at": _COUNT,
            "model": TEXT,
            "status": one_of("completed", "incomplete"),
            "output": array(JSON_OBJECT),
        }
    ),
    "Message": answer(
        {
            "id": TEXT,
            "type": one_of("message"),
            "role": one_of("assistant"),
            "model": TEXT,
            "content": array(JSON_OBJECT),
            "stop_reason": TEXT,
            "stop_sequence": _MAYBE,
            "usage": answer({"input_tokens": _COUNT, "output_tokens": _COUNT}),
        }
    ),
    "TokenCount": answer({"input_tokens": _COUNT}),
    "EmbeddingList": answer(
        {
            "object": one_of("list"),
            "data": array(answer({"object": one_of("embedding"), "index": _COUNT, "embedding": ANYTHING})),
            "model": TEXT,
            "usage": answer({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "Tokens": either(
        answer({"tokens": array(either(_COUNT, answer({"id": _COUNT, "piece": ANYTHING})))}),
        answer({"object": one_of("tokenize.batch"), "results": array(answer({"request_index": _COUNT}))}),
    ),
    "Tokenizer": answer({"object": one_of("tokenizer"), "identity": JSON_OBJECT, "limits": JSON_OBJECT}),
    "Text": answer({"content": TEXT}),
    "Prompt": answer({"prompt": TEXT}),
    "List": answer({"object": one_of("list"), "data": array(JSON_OBJECT)}),
    "Model": answer(
        {
            "id": TEXT,
            "object": one_of("model"),
            "created": _COUNT,
            "owned_by": TEXT,
            "context_length": _COUNT,
            "supported_parameters": array(TEXT),
            "capabilities": JSON_OBJECT,
        }
    ),
    "Deleted": answer({"id": TEXT, "deleted": FLAG}),
    "Status": answer({"status": TEXT}),
    "Error": answer({"error": answer({"message": TEXT, "type": TEXT, "param": _MAYBE, "code": TEXT})}),
    "AnthropicError": answer({"type": one_of("error"), "error": answer({"type": TEXT, "message": TEXT})}),
}

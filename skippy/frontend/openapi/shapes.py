"""Words for JSON schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
ANYTHING: Schema = {}
JSON_OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def integer(low: int, high: int | None = None) -> Schema:
    schema: Schema = {"type": "integer", "minimum": low}
    return schema if high is None else {**schema, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def array(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    return schema if most is None else {**schema, "maxItems": most}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def record(properties: dict[str, Schema], *, required: Sequence[str] = ()) -> Schema:
    """An object of a request: no other members, and null for one that might as well be absent."""
    return {
        "type": "object",
        "properties": {
            name: schema if name in required or not schema else either(schema, {"type": "null"})
            for name, schema in properties.items()
        },
        "required": list(required),
        "additionalProperties": False,
    }


def answer(properties: dict[str, Schema]) -> Schema:
    """An object of an answer: all of these members, and perhaps more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def described(text: str, schema: Schema) -> Schema:
    return {"description": text, **schema}


PARSED: Schema = described("What OpenAI's client has made of a text; not looked at.", {})
REFUSAL: Schema = record({"type": one_of("refusal"), "refusal": TEXT}, required=("type", "refusal"))

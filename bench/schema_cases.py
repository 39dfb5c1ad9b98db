"""Random JSON Schemas with bounded lengths, for judging what is generated under them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

import jsonschema

Schema = dict[str, Any]

_WORDS: Final = ("id", "name", "title", "kind", "count", "price", "size", "tags", "city", "owner", "notes",
                 "active", "score", "level", "first-name", "größe", "名前", "a.b", "two words")  # fmt: skip
_PATTERNS: Final = (
    "^[A-Z]{2,4}-[0-9]{1,5}$",
    "^(red|green|blue)$",
    "^[a-z]+(_[a-z]+){0,3}$",
    "[0-9]{3}",
    "^#?x",
)
_FORMATS: Final = (
    "date",
    "time",
    "date-time",
    "uuid",
    "ipv4",
    "ipv6",
    "email",
    "hostname",
    "duration",
    "uri",
)


def random_schema(seed: int) -> Schema:
    """A schema of an object, as a client would send it; the same for the same seed."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.3:
        schema["$defs"] = {"item": _any(rng, 1), "node": _node(rng)}
        schema["properties"]["item"] = {"$ref": "#/$defs/item"}
        if rng.random() < 0.5:
            schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        schema["required"] = sorted({*schema["required"], "item"})
    return schema


def judge(schema: Any, text: str) -> None:
    """Raises json.JSONDecodeError or jsonschema.ValidationError where a text is not valid by a schema."""
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    checker.validate(json.loads(text))


def _node(rng: random.Random) -> Schema:
    """A tree, recursive by way of a reference."""
    child: Schema = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    properties = {"value": _integer(rng, 0), "next": child}
    return {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    properties = {name: _any(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    schema: Schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["description"] = "what a client says of it"
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(rng, depth - 1), "maxItems": rng.randint(1, 4)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, schema["maxItems"])
    if rng.random() < 0.2:
        schema["prefixItems"] = [_any(rng, 0), _any(rng, 0)]
    return schema


def _string(rng: random.Random, _: int) -> Schema:
    choice = rng.random()
    if choice < 0.2:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 24}
    if choice < 0.4:
        return {"type": "string", "format": rng.choice(_FORMATS), "maxLength": 40}
    longest = rng.randint(1, 24)
    schema: Schema = {"type": "string", "maxLength": longest}
    if rng.random() < 0.4:
        schema["minLength"] = rng.randint(0, longest)
    return schema


def _integer(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 1, 9, 50, 100_000])}
    if rng.random() < 0.2:
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 500}
    if rng.random() < 0.2:
        schema |= {"minimum": low, "maximum": low + 200, "multipleOf": rng.choice([2, 5, 10])}
    return schema


def _number(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low / 2, "maximum": low / 2 + rng.choice([1, 10, 1000])}


def _choice(rng: random.Random, _: int) -> Schema:
    values: list[Any] = ["red", "grün", "🙂", 'a "b"\n', 1, -2.5, True, None, [1, "x"], {"k": [None]}]
    chosen = rng.sample(values, rng.randint(1, 5))
    return {"const": chosen[0]} if rng.random() < 0.3 else {"enum": chosen}


def _nullable(rng: random.Random, _: int) -> Schema:
    return {"type": [rng.choice(["boolean", "integer"]), "null"], "minimum": 0, "maximum": 99}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {rng.choice(["anyOf", "anyOf", "oneOf"]): [{"type": "null"}, _object(rng, depth - 1)]}


def _any(rng: random.Random, depth: int) -> Schema:
    flat: list[Callable[[random.Random, int], Schema]]
    flat = [_string, _string, _integer, _number, _choice, _nullable, lambda *_: {"type": "boolean"}]
    nested = [_object, _array, _any_of] if depth > 0 else []
    return rng.choice([*flat, *nested])(rng, depth)

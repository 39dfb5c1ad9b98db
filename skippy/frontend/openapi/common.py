"""Schemas of parameters that several routes have."""

from __future__ import annotations

from typing import Final

from ..sampling import GROUPS, NUMBERS, Number
from .shapes import FLAG, JSON_OBJECT, TEXT, Schema, array, described, either, integer, number, one_of, record

_I32: Final = 2**31 - 1
_U32: Final = 2**32 - 1
JSON_SCHEMA: Final = JSON_OBJECT

_BREAKERS: Final[Schema] = array({"type": "string", "minLength": 1, "maxLength": 64})
_BIAS: Final[Schema] = number(-100, 100)


def _number(one: Number) -> Schema:
    return integer(int(one.low), int(one.high)) if one.integer else number(one.low, one.high)


def _sampling() -> dict[str, Schema]:
    """The parameters of :mod:`skippy.frontend.sampling`, whose tables have names and ranges."""
    schemas = {name: _number(one) for one in NUMBERS for name in one.names}
    for group, numbers in GROUPS.items():
        members = {one.names[0]: _number(one) for one in numbers}
        if group == "dry":
            members["sequence_breakers"] = _BREAKERS
        schemas[group] = described(f"The same as {group}_….", record(members))
        schemas |= {f"{group}_{name}": schema for name, schema in members.items()}
    return {
        **schemas,
        "samplers": described("The order in which samplers are applied.", either(TEXT, array(TEXT))),
        "sampler_sequence": described("The same as one letter each.", TEXT),
        "seed": integer(-(2**63), 2**64 - 1),
        "ignore_eos": FLAG,
        "logit_bias": described(
            "By token id.",
            either(
                {"type": "object", "additionalProperties": _BIAS, "maxProperties": 256},
                array(
                    {
                        "type": "array",
                        "prefixItems": [integer(0, _I32), either(_BIAS, one_of(False))],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                    most=256,
                ),
            ),
        ),
    }


SAMPLING: Final = _sampling()

STOP: Final[Schema] = either(
    {"type": "string", "minLength": 1, "maxLength": 1024},
    array({"type": "string", "minLength": 1, "maxLength": 1024}, most=16),
)
LIMIT: Final[Schema] = described("Tokens of the answer at most.", integer(1, _U32))
_OPEN_LIMIT: Final[Schema] = described(
    "Tokens of the answer at most; -1 is the rest of the context.", either(integer(1, _U32), one_of(-1))
)

ANSWERING: Final[dict[str, Schema]] = {
    "model": TEXT,
    "stream": FLAG,
    "stream_options": record({"include_usage": FLAG, "include_obfuscation": one_of(False)}),
    "stop": STOP,
    "max_tokens": _OPEN_LIMIT,
    "n_predict": _OPEN_LIMIT,
    "n": described("Choices for each prompt.", integer(1, 128)),
    "user": TEXT,
    "cache_prompt": one_of(True),
    "id_slot": one_of(-1),
    "min_keep": one_of(0, 1),
    "prompt_cache_key": described("Cached prompts are shared by requests with the same one.", TEXT),
    "prompt_cache_retention": one_of("in_memory", "24h"),
    "response_format": either(
        record({"type": one_of("text")}, required=("type",)),
        record({"type": one_of("json_object"), "schema": JSON_SCHEMA}, required=("type",)),
        record(
            {
                "type": one_of("json_schema"),
                "json_schema": record(
                    {"name": TEXT, "description": TEXT, "schema": JSON_SCHEMA, "strict": FLAG},
                    required=("name", "schema"),
                ),
            },
            required=("type", "json_schema"),
        ),
    ),
    "json_schema": described("The same as a response_format of that schema.", JSON_SCHEMA),
    "grammar": described("GBNF that the answer must follow.", TEXT),
    **SAMPLING,
}
"""What chat and completions have in common."""

METADATA: Final[Schema] = {"type": "object", "additionalProperties": TEXT}
IGNORED_SERVICE: Final[dict[str, Schema]] = {
    "metadata": METADATA,
    "safety_identifier": TEXT,
    "service_tier": one_of("auto", "default"),
}
"""Accepted, as they cannot change an answer."""

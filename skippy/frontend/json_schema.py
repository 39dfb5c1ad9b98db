"""JSON Schemas → grammars.

The grammar of a schema is llguidance's: it follows JSON Schema's draft 2020-12, and refuses what it cannot
enforce. What is checked here comes before that: limits, and that no keyword is passed over in silence, so
that an error names the keyword and its place. ``docs/structured-output.md`` lists what is enforced.
"""

from __future__ import annotations

import copy
import json
from typing import Any, Final

from .errors import ApiError
from .fields import describe

MAX_DEPTH: Final = 32
"""Schemas within schemas."""
MAX_SCHEMAS: Final = 2_000
MAX_CHARACTERS: Final = 64 * 1024
"""Of a schema as compact JSON."""

WHITESPACE: Final = r" |\n[ \t]{0,20}"
"""What may stand, once, wherever JSON allows white space: models that are unsure go on with it for ever."""

MAX_OPTIONAL: Final = 240
"""Properties in a row that may be left out: any of them may come next, so the parser looks at all of them."""
MAX_LENGTH: Final = 2**31 - 1
"""Of what keywords such as ``maxLength`` count; more is none of a computer's."""

SMALLEST_STEP: Final = 1e-9
"""Of numbers, which are so long at most; models that are unsure go on with digits, too."""

_ENFORCED: Final = frozenset(
    (  # noqa: SIM905
        "type enum const anyOf oneOf allOf $ref properties required additionalProperties patternProperties "
        "minProperties maxProperties items prefixItems additionalItems minItems maxItems minLength maxLength "
        "pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
    ).split()
)
_SAYS_NOTHING: Final = frozenset(
    (  # noqa: SIM905
        "$schema $id $comment $defs definitions title description default examples deprecated readOnly "
        "writeOnly contentMediaType contentEncoding"
    ).split()
)
# llguidance's own forms of these know neither how long a month is nor when a minute has 61 seconds.
_YEAR: Final = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    f"({_LEAP_YEAR}-02-29|{_YEAR}-((0[13578]|1[02])-31|(0[13-9]|1[0-2])-(29|30)|"
    "(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])))"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_EXACT_FORMATS: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

_LENGTHS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTED_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS: Final = ("items", "additionalProperties", "additionalItems")


def schema_rule(schema: Any, path: str) -> str:
    """What stands for the JSON values of a schema in a grammar, wherever a rule's name could stand.

    Args:
        path: of the schema in the request.

    Raises:
        ApiError: 400, naming the keyword and its path.
    """
    schema = copy.deepcopy(schema)
    _check(schema, path)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_CHARACTERS:
        raise ApiError(
            f"{path} has {len(text)} characters as compact JSON; at most {MAX_CHARACTERS} are allowed",
            param=path,
        )
    return f"%json {text}"


def literal(text: str) -> str:
    """What stands for a text in a grammar. It must not be empty."""
    return json.dumps(text, ensure_ascii=False)


def _check(root: Any, root_path: str) -> None:
    """Refuse what would be passed over, and what is too deep or too much; make formats exact."""
    level, count = [(root, root_path)], 0
    for _ in range(MAX_DEPTH):
        below: list[tuple[Any, str]] = []
        for schema, path in level:
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise ApiError(f"{path} must be a schema: an object, true or false", param=path)
            _check_keywords(schema, path)
            _prepare(schema)
            below += _inside(schema, path)
        count += len(level)
        if count > MAX_SCHEMAS:
            text = f"{root_path} holds more than {MAX_SCHEMAS} schemas"
            raise ApiError(text, param=root_path)
        if not below:
            return
        level = below
    path = level[0][1]
    raise ApiError(f"{path} is nested more than {MAX_DEPTH} schemas deep", param=path)


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for keyword, value in schema.items():
        if keyword in _ENFORCED or keyword in _SAYS_NOTHING:
            continue
        if keyword == "uniqueItems" and value is False:
            continue
        where = f"{path}.{keyword[:100]}"
        text = f"{where}: the keyword {keyword[:100]!r} is not supported in schemas that answers are held to"
        raise ApiError(text, param=where, code="unsupported_model_feature")
    for keyword in _LENGTHS:
        value = schema.get(keyword, 0)
        # JSON Schema takes 3.0 for an integer.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            where = f"{path}.{keyword}"
            raise ApiError(f"{where} must be a whole number, not {describe(value)}", param=where)
        if not 0 <= value <= MAX_LENGTH:
            text = f"{path}.{keyword} is {repr(value)[:40]}; it must be from 0 to {MAX_LENGTH}"
            raise ApiError(text, param=f"{path}.{keyword}")
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    _check_optional(schema.get("properties"), required, f"{path}.properties")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(1, known):
        where = f"{path}.minProperties"
        text = f"{where} is {least}; above 1 it can only be met by as many required properties"
        raise ApiError(text, param=where, code="unsupported_model_feature")


def _check_optional(properties: Any, required: Any, path: str) -> None:
    """Refuse more properties that may be left out, one behind the other, than a draw can look at."""
    if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL:
        return
    needed = (
        set(required) if isinstance(required, list) and all(isinstance(n, str) for n in required) else set()
    )
    optional = 0
    for name in properties:
        optional = 0 if name in needed else optional + 1
        if optional > MAX_OPTIONAL:
            raise ApiError(
                f"{path} has more than {MAX_OPTIONAL} properties in a row that are not required; require "
                "some of them, or put them into objects of their own",
                param=path,
                code="unsupported_model_feature",
            )


def _prepare(schema: dict[str, Any]) -> None:
    """Leave out what says nothing, bound fractions, and put exact patterns in the place of some formats."""
    schema.pop("uniqueItems", None)  # false
    schema.update({keyword: int(schema[keyword]) for keyword in _LENGTHS if keyword in schema})
    kinds = schema.get("type")
    numeric = kinds == "number" or (isinstance(kinds, list) and "number" in kinds)
    if numeric and not {"multipleOf", "enum", "const"} & schema.keys():
        schema["multipleOf"] = SMALLEST_STEP
    form = schema.get("format")
    pattern = _EXACT_FORMATS.get(form) if isinstance(form, str) else None
    if pattern is None:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = pattern
    else:
        parts = schema.get("allOf", [])
        schema["allOf"] = [*parts, {"pattern": pattern}] if isinstance(parts, list) else parts


def _inside(schema: dict[str, Any], path: str) -> list[tuple[Any, str]]:
    """The schemas right inside a schema, and their paths."""
    found: list[tuple[Any, str]] = []
    for keyword in _NAMED_SCHEMAS:
        value = schema.get(keyword, {})
        where = f"{path}.{keyword}"
        if not isinstance(value, dict):
            raise ApiError(f"{where} must be an object, not {describe(value)}", param=where)
        found += [(inner, f"{where}.{name[:100]}") for name, inner in value.items()]
    for keyword in _LISTED_SCHEMAS:
        value = schema.get(keyword, [])
        where = f"{path}.{keyword}"
        if isinstance(value, list):
            found += [(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
        elif keyword not in _SCHEMAS:
            raise ApiError(f"{where} must be an array, not {describe(value)}", param=where)
    for keyword in _SCHEMAS:
        if keyword in schema and not isinstance(schema[keyword], list):
            found.append((schema[keyword], f"{path}.{keyword}"))
    return found

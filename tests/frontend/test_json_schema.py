"""JSON Schemas: what fits their grammars is valid, and what cannot be enforced is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from bench.schema_cases import judge, random_schema
from skippy.engine.grammar import Grammar, GrammarMismatch, GrammarVocabulary, read_tokens
from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.constraints import parse_constraint
from skippy.frontend.errors import ApiError
from skippy.frontend.fields import Fields
from skippy.frontend.generation import Constraint
from skippy.frontend.json_schema import MAX_DEPTH, MAX_LENGTH, MAX_OPTIONAL, literal, schema_rule
from skippy.workers.grammar import Checker

VOCABULARY = GrammarVocabulary.of(ToyVocabulary())
CHECKER = Checker(read_tokens(ToyVocabulary()))


def compiled(schema: Any) -> Grammar:
    grammar = f"start: {schema_rule(schema, 'schema')}"
    assert CHECKER.answer({"grammar": grammar}) == {}
    return VOCABULARY.compile(grammar, 0)


def fits(grammar: Grammar, text: str) -> bool:
    grammar.rewind(0)
    try:
        return bool(grammar.allowed(list(text.encode()))[ToyVocabulary.EOS])
    except GrammarMismatch:
        return False


def walk(grammar: Grammar, rng: random.Random) -> str:
    """A text drawn byte by byte from what may follow, in favour of what comes to an end."""
    weights = np.ones(ToyVocabulary().size)
    weights[list(b'"]},')], weights[ToyVocabulary.EOS] = 8, 20
    history: list[int] = []
    while True:
        allowed = np.flatnonzero(grammar.allowed(history))
        token = rng.choices(allowed.tolist(), weights[allowed].tolist())[0]
        if token >= 256:
            return bytes(history).decode()
        history.append(token)
        assert len(history) < 5000


@pytest.mark.parametrize("seed", range(60))
def test_whatever_fits_a_random_schema_is_valid(seed: int) -> None:
    schema, rng = random_schema(seed), random.Random(seed)
    grammar = compiled(schema)
    for _ in range(2):
        grammar.rewind(0)
        judge(schema, walk(grammar, rng))


_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (_PERSON, ['{"name":"x"}', '{"name": "é", "age": 7}'], ['{"age":7}', '{"name":"","age":7}', "{}"]),
        (_PERSON, ['{"name":"x"\n    }'], ['{"age":7,"name":"x"}', '{"name":"x","more":1}', '{"name":"x",}']),
        (_TREE, ["[]", "[[],[[]]]"], ["[[],[],[]]", "[1]", "[[]"]),
        ({"enum": ["a", 1, None, {"k": [True]}]}, ['"a"', "1", "null", '{"k":[true]}'], ["2", '"b"', "{}"]),
        ({"const": 'a"b\n'}, ['"a\\"b\\n"'], ['"ab"', '"a\\"b"']),
        ({"type": ["string", "null"], "maxLength": 2}, ["null", '"ab"', '"语é"'], ['"abc"', "1"]),
        ({"type": "integer", "minimum": -5, "maximum": 12}, ["-5", "0", "12"], ["-6", "13", "1.5", "012"]),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 2}, ["1.5", "2", "2.0"], ["1", "0.9", "2.01"]),
        ({"type": ["number", "null"]}, ["1.123456789", "-7", "null"], ["1.1234567891", "1e5"]),
        ({"enum": [1, 2.5], "type": "number"}, ["1", "2.5"], ["2"]),
        ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}, ["0", "45"], ["3", "55"]),
        ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"',
          '"2000-04-31"', '"1900-02-29"', '"0000-01-01"', '"2000-13-01"']),
        ({"format": "date", "pattern": "^20", "type": "string"}, ['"2024-02-29"'], ['"1999-12-31"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"00:00:00.5+01:00"'], ['"23:59:60Z"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T12:00:00Z"'], ['"1900-02-29T12:00:00Z"']),
        ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"'], ['"256.0.0.1"']),
        ({"prefixItems": [{"type": "null"}], "items": {"const": 1}, "type": "array"}, ["[null,1]"], ["[1]"]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1}, ["[true]"], ["[]", "[1]"]),
        ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, ["null", "5"], ["true"]),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, ["5", "5.5"], ['"5"']),
        ({"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 4}]}, ["3", "4"], ["2", "5"]),
        ({"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
         ['{"x":null}', "{}"], ['{"x":1}', '{"x":null,"y":null}']),
        ({"type": "object", "patternProperties": {"^x": {"const": 1}}, "additionalProperties": False},
         ['{"x1":1}', "{}"], ['{"y":1}', '{"x1":2}']),
        ({"type": "object"}, ["{}", '{"a":{"b":[1,"x",null]}}'], ["[]", '{"a"}', '{"a":1']),
        (True, ["1", "[]", '"x"'], ["", "x"]),
        ({"type": "string"}, ['"\\n\\u001f"'], ['"\\ud800"', '"\n"', '"\\q"']),
        ({"type": "object", "uniqueItems": False}, ["{}"], ["1"]),
    ],
)  # fmt: skip
def test_what_schemas_mean(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = compiled(schema)
    assert [text for text in good if not fits(grammar, text)] == []
    assert [text for text in bad if fits(grammar, text)] == []


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def optional(count: int, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {} for n in range(count)}, "required": list(required)}


def test_the_bounds_of_what_is_named() -> None:
    """What is just within them can be used; a required property in between begins a new row."""
    between = optional(2 * MAX_OPTIONAL + 1, f"p{MAX_OPTIONAL}")
    lengths = {"type": "string", "minLength": 2.0, "maxLength": MAX_LENGTH}
    for schema in (optional(MAX_OPTIONAL), between, lengths, {"type": "array", "maxItems": MAX_LENGTH}):
        compiled(schema).allowed([])
    with pytest.raises(ApiError, match=r"^s\.maxLength is 1000000000000000000; .* from 0 to 2147483647$"):
        schema_rule({"maxLength": 10**18}, "s")


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"not": {}}, "s.not"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "s.properties.a.items.uniqueItems"),
        ({"anyOf": [{}, {"if": {}}]}, "s.anyOf[1].if"),
        ({"$defs": {"x": {"contains": {}}}}, "s.$defs.x.contains"),
        ({"additionalProperties": {"propertyNames": {}}}, "s.additionalProperties.propertyNames"),
        ({"x-guidance": {"lenient": True}}, "s.x-guidance"),
        ({"nullable": True}, "s.nullable"),
        ({"type": "object", "minProperties": 2}, "s.minProperties"),
        ({"properties": []}, "s.properties"),
        ({"properties": {"a": 5}}, "s.properties.a"),
        ({"anyOf": {}}, "s.anyOf"),
        ({"items": 5}, "s.items"),
        ([], "s"),
        ("x", "s"),
        ({"type": "string", "maxLength": 10**18}, "s.maxLength"),
        ({"type": "string", "minLength": 2**31}, "s.minLength"),
        ({"type": "array", "maxItems": 10**400}, "s.maxItems"),
        ({"type": "array", "minItems": -1}, "s.minItems"),
        ({"items": {"maxProperties": 1.5}}, "s.items.maxProperties"),
        ({"minProperties": True}, "s.minProperties"),
        ({"maxLength": "5"}, "s.maxLength"),
        (optional(1900), "s.properties"),
        (optional(MAX_OPTIONAL + 1), "s.properties"),
        ({"anyOf": [optional(MAX_OPTIONAL + 2, "p0")]}, "s.anyOf[0].properties"),
        (nested(MAX_DEPTH), "s" + ".items" * MAX_DEPTH),
        ({"anyOf": [{}] * 2001}, "s"),
        ({"description": "x" * 70_000}, "s"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        schema_rule(schema, "s")
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "format": "idn-hostname"}, "Unknown format: idn-hostname"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
        ({"type": "colour"}, "Invalid type: colour"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "#"}, "no text fits it"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "string", "enum": [1]}, "Unsatisfiable"),
        (False, "Unsatisfiable"),
        ({"required": "a"}, "required"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, ""),
        ({"type": "string", "pattern": "["}, "regex"),
    ],
)
def test_what_has_no_grammar_is_explained(schema: Any, reason: str) -> None:
    grammar = f"start: {schema_rule(schema, 's')}"
    error = CHECKER.answer({"grammar": grammar}).get("error", "")
    assert error
    assert reason in error
    assert len(error) < 400


def constraint(**body: Any) -> Constraint | None:
    fields = Fields(body)
    found = parse_constraint(fields)
    fields.refuse_unknown()
    return found


def test_ways_to_ask() -> None:
    rule = schema_rule(_PERSON, "x")
    strict = {"name": "person", "schema": _PERSON, "strict": True, "description": "who"}
    expected = f"start: {rule}\n"
    for body, param in (
        (
            {"response_format": {"type": "json_schema", "json_schema": strict}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "schema": _PERSON}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": _PERSON}}, "response_format.schema"),
        ({"json_schema": _PERSON}, "json_schema"),
    ):
        assert constraint(**body) == Constraint(expected, param)
    anything = constraint(response_format={"type": "json_object"})
    assert anything == Constraint(f"start: {schema_rule({'type': 'object'}, 'x')}\n", "response_format")
    assert constraint(grammar='root ::= "x"') == Constraint("start: R0\nR0: /[\\x{78}-\\x{78}]/\n", "grammar")
    for body in ({}, {"response_format": {"type": "text"}}, {"grammar": ""}, {"response_format": None}):
        assert constraint(**body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "x": 1}}},
         "response_format.json_schema.x"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}},  # noqa: E501
         "response_format.json_schema.strict"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}, "grammar"),
        ({"json_schema": {}, "grammar": 'root ::= "x"'}, "grammar"),
        ({"json_schema": {"not": {}}}, "json_schema.not"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"grammar": 5}, "grammar"),
    ],
)  # fmt: skip
def test_ways_that_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        constraint(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_texts_in_grammars() -> None:
    for text in ("<tool_call>\n", 'a "quoted" \\ text', "é语😀", "\t/[a]/ | x", "{}"):
        grammar = VOCABULARY.compile(f"start: {literal(text)}", 0)
        assert fits(grammar, text)
        assert not fits(grammar, text + "x")


def test_the_judge_sees_what_is_wrong() -> None:
    with pytest.raises(jsonschema.ValidationError):
        judge(_PERSON, '{"name": ""}')
    with pytest.raises(json.JSONDecodeError):
        judge(_PERSON, '{"name": ')

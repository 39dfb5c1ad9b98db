"""What a request says about the form of its answer: ``response_format``, ``json_schema`` and ``grammar``."""

from __future__ import annotations

import re
from typing import Any, Final

from skippy.stage import SettingsRefused, StageError
from skippy.stage.grammars import Grammars, GrammarsBusy

from .errors import ApiError
from .fields import Fields
from .gbnf import GbnfError, gbnf_to_lark
from .generation import Constraint, GenerationError, InvalidGrammar, InvalidSampling, TooManyRequests
from .json_schema import schema_rule

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_GRAMMAR: Final = "grammar: "
_FORMATS: Final = ("text", "json_object", "json_schema")


def parse_constraint(fields: Fields) -> Constraint | None:
    """What a request asks for; None: nothing.

    Raises:
        ApiError: 400; it is malformed, asks for what is not supported, or for two things at once.
    """
    found = [
        constraint
        for constraint in (_response_format(fields), _json_schema(fields), _grammar(fields))
        if constraint is not None
    ]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise ApiError(
            f"{first} and {second} both say what the answer looks like; give only one", param=second
        )
    return found[0] if found else None


def _response_format(fields: Fields) -> Constraint | None:
    value = fields.get("response_format")
    if value is None:
        return None
    form = Fields.of(value, "response_format")
    kind = form.text("type")
    if kind not in _FORMATS:
        shown = "missing" if kind is None else repr(kind[:40])
        code = "" if kind is None else "unsupported_model_feature"
        raise form.error("type", f"is {shown}; it must be one of {', '.join(_FORMATS)}", code=code)
    if kind == "text":
        form.refuse_unknown()
        return None
    if kind == "json_object":
        schema = form.get("schema")  # as llama.cpp has it
        form.refuse_unknown()
        if schema is None:
            return _of_schema({"type": "object"}, "response_format")
        return _of_schema(schema, "response_format.schema")
    if form.is_given("json_schema"):
        inner = Fields.of(form.get("json_schema"), "response_format.json_schema")
        name = inner.text("name")
        if name is None or not _NAME.fullmatch(name):
            raise inner.error("name", "must be 1 to 64 letters, digits, underscores or dashes")
        inner.text("description")
        inner.boolean("strict")  # the answer is held to the schema either way
    else:
        inner = form  # as llama.cpp has it
    schema = inner.get("schema")
    if schema is None:
        raise inner.error("schema", "is missing")
    inner.refuse_unknown()
    form.refuse_unknown()
    return _of_schema(schema, inner.path("schema"))


def _json_schema(fields: Fields) -> Constraint | None:
    schema = fields.get("json_schema")
    return None if schema is None else _of_schema(schema, "json_schema")


def _of_schema(schema: Any, path: str) -> Constraint:
    return Constraint(f"start: {schema_rule(schema, path)}\n", path)


def _grammar(fields: Fields) -> Constraint | None:
    text = fields.text("grammar")
    if not text:
        return None
    try:
        return Constraint(gbnf_to_lark(text), "grammar")
    except GbnfError as error:
        raise fields.error("grammar", f"is no GBNF that can be used: {error}") from error


def refusal(refused: SettingsRefused, constraint: Constraint | None) -> InvalidSampling:
    """What a stage's refusal is to the client, in the words of whatever it has asked for."""
    text = str(refused)
    if constraint is None or not text.startswith(_GRAMMAR):
        return InvalidSampling(text)
    return InvalidGrammar(
        f"{constraint.param} cannot be used: {text.removeprefix(_GRAMMAR)}", constraint.param
    )


async def check_constraint(constraint: Constraint, grammars: Grammars, client: str = "") -> None:
    """Compile a request's grammar for a test, as the last stage will, before it costs a lane.

    Args:
        client: as :attr:`GenerationRequest.client`.

    Raises:
        InvalidGrammar: what is wrong with it.
        TooManyRequests: too many wait to be compiled.
        GenerationError: none can be compiled.
    """
    try:
        await grammars.check(constraint.grammar, client)
    except SettingsRefused as exc:
        raise refusal(exc, constraint) from exc
    except GrammarsBusy as exc:
        raise TooManyRequests(str(exc)) from exc
    except StageError as exc:
        raise GenerationError(str(exc)) from exc

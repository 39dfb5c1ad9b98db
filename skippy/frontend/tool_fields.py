"""Tools in request bodies: ``tools``, ``tool_choice``, ``parallel_tool_calls``, and calls in messages."""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal, cast

import attrs

from .errors import ApiError
from .fields import Fields, describe
from .json_schema import schema_rule
from .tools import ToolCall

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
"""Calls of one message."""
MAX_DESCRIPTION: Final = 16 * 1024
"""Characters of a tool's description."""
MAX_PARAMETERS: Final = 128 * 1024
"""Characters of a tool's ``parameters`` as JSON."""
MAX_ID: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")

ChoiceMode = Literal["auto", "none", "required"]


@attrs.frozen(slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, as the client wrote it; None: it gave none.
        strict: the arguments must fit the schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @property
    def texts(self) -> frozenset[str]:
        """Names of the parameters that are texts by its schema."""
        properties = (self.parameters or {}).get("properties")
        if not isinstance(properties, dict):
            return frozenset()
        return frozenset(name for name, schema in properties.items() if _is_text(schema))


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kinds is None and isinstance(values, list):
        return all(isinstance(value, str) for value in values)
    return kinds == "string" or kinds in (["string"], ["string", "null"], ["null", "string"])


@attrs.frozen(slots=True, kw_only=True)
class ToolUse:
    """What a request says about tools.

    Attributes:
        tools: those the model is told of; none if it is not to call any.
        required: the answer must be a call.
        allowed: names of those it may call; all of ``tools`` unless the choice says otherwise.
        parallel: whether one answer may have several calls.
        arguments: for each of the tools that may be called, what stands for its arguments in a grammar. They
            are held to its schema if it is strict, or if there must be a call.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    allowed: frozenset[str] = frozenset()
    parallel: bool = True
    arguments: dict[str, str] = attrs.field(factory=dict, eq=False)

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar must hold the answer to its calls."""
        return self.required or any(tool.strict for tool in self.tools if tool.name in self.allowed)


def parse_tool_use(fields: Fields) -> ToolUse:
    """Read the fields of a chat request that concern tools.

    Raises ApiError.
    """
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        allowed: tuple[Any, ...] = ([],) if old == "functions" else ("none", "auto")
        fields.accept_only(old, allowed, f"it was replaced by {new}")
    tools = _tools(fields)
    parallel = fields.boolean("parallel_tool_calls", default=True)
    mode, names = _choice(fields, [tool.name for tool in tools])
    if mode == "none":
        return ToolUse()
    required = mode == "required"
    arguments = {
        tool.name: _arguments_rule(tool, required, f"{fields.path('tools')}[{index}].function.parameters")
        for index, tool in enumerate(tools)
        if tool.name in names
    }
    return ToolUse(tools=tools, required=required, allowed=names, parallel=parallel, arguments=arguments)


def _arguments_rule(tool: Tool, required: bool, path: str) -> str:
    """What stands for a tool's arguments in a grammar. Raises ApiError: its schema cannot be enforced."""
    if not (required or tool.strict):
        return schema_rule({"type": "object"}, path)
    schema = tool.parameters or {}
    if schema.get("type", "object") != "object":
        text = "must be 'object': arguments have names"
        raise ApiError(f"{path}.type {text}", param=f"{path}.type")
    return schema_rule({**schema, "type": "object"}, path)


def _tools(fields: Fields) -> tuple[Tool, ...]:
    values = fields.array("tools") or []
    if len(values) > MAX_TOOLS:
        raise fields.error("tools", f"has {len(values)} entries; at most {MAX_TOOLS} are allowed")
    tools: list[Tool] = []
    names: set[str] = set()
    for index, value in enumerate(values):
        entry = Fields.of(value, f"{fields.path('tools')}[{index}]")
        require_type(entry, "function")
        function = Fields.of(entry.get("function"), entry.path("function"))
        tool = parse_function(function)
        if tool.name in names:
            raise function.error("name", f"is {tool.name!r}, which is another tool's name too")
        names.add(tool.name)
        tools.append(tool)
        entry.refuse_unknown()
    return tuple(tools)


def require_type(fields: Fields, expected: str) -> None:
    """Refuse ``type`` unless it is ``expected``."""
    if fields.text("type") != expected:
        raise fields.other_type(f"it must be {expected!r}")


def parse_function(fields: Fields, parameters: str = "parameters") -> Tool:
    """A function's name, description, schema (in the field ``parameters``) and ``strict``."""
    name = tool_name(fields, "name")
    description = fields.text("description")
    if description is not None and len(description) > MAX_DESCRIPTION:
        text = f"has {len(description)} characters; at most {MAX_DESCRIPTION} are allowed"
        raise fields.error("description", text)
    schema = fields.get(parameters)
    if schema is not None:
        if not isinstance(schema, dict):
            raise fields.error(parameters, f"must be an object, a JSON schema, not {describe(schema)}")
        size = len(json.dumps(schema))
        if size > MAX_PARAMETERS:
            text = f"has {size} characters as JSON; at most {MAX_PARAMETERS} are allowed"
            raise fields.error(parameters, text)
    strict = fields.boolean("strict")
    fields.refuse_unknown()
    return Tool(name, description, schema, strict)


def tool_name(fields: Fields, field: str) -> str:
    name = fields.text(field)
    if name is None or not _NAME.fullmatch(name):
        shown = "is missing" if name is None else f"is {name[:80]!r}"
        raise fields.error(field, f"{shown}; it must be 1 to 64 letters, digits, underscores and hyphens")
    return name


def _choice(fields: Fields, names: list[str]) -> tuple[ChoiceMode, frozenset[str]]:
    """The mode, and the names of the tools that may be called."""
    value = fields.get("tool_choice")
    everything = frozenset(names)
    if value is None:
        return "auto", everything
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            text = f"is {value[:40]!r}; it must be 'auto', 'none', 'required' or an object"
            raise fields.error("tool_choice", text)
        if value == "required" and not names:
            raise fields.error("tool_choice", "is 'required', but there are no tools")
        return cast(ChoiceMode, value), everything
    choice = Fields.of(value, fields.path("tool_choice"))
    kind = choice.text("type")
    if kind == "allowed_tools":
        return _allowed_tools(choice, names)
    require_type(choice, "function")
    name = _known_function(choice, names)
    choice.refuse_unknown()
    return "required", frozenset({name})


def _known_function(fields: Fields, names: list[str]) -> str:
    """The name in ``function.name``, which must be that of a tool."""
    function = Fields.of(fields.get("function"), fields.path("function"))
    name = tool_name(function, "name")
    if name not in names:
        raise function.error("name", f"is {name!r}, which is not among the tools")
    function.refuse_unknown()
    return name


def _allowed_tools(choice: Fields, names: list[str]) -> tuple[ChoiceMode, frozenset[str]]:
    allowed = Fields.of(choice.get("allowed_tools"), choice.path("allowed_tools"))
    mode = allowed.text("mode")
    if mode not in ("auto", "required"):
        raise allowed.error("mode", "must be 'auto' or 'required'")
    entries = allowed.array("tools")
    if not entries:
        raise allowed.error("tools", "is missing or empty; at least one tool is needed")
    chosen = set()
    for index, entry in enumerate(entries):
        fields = Fields.of(entry, f"{allowed.path('tools')}[{index}]")
        require_type(fields, "function")
        chosen.add(_known_function(fields, names))
        fields.refuse_unknown()
    allowed.refuse_unknown()
    choice.refuse_unknown()
    return cast(ChoiceMode, mode), frozenset(chosen)


def parse_calls(fields: Fields) -> tuple[ToolCall, ...]:
    """``tool_calls`` of an assistant's message."""
    values = fields.array("tool_calls") or []
    if len(values) > MAX_CALLS:
        raise fields.error("tool_calls", f"has {len(values)} entries; at most {MAX_CALLS} are allowed")
    calls = []
    for index, value in enumerate(values):
        entry = Fields.of(value, f"{fields.path('tool_calls')}[{index}]")
        if entry.is_given("type"):
            require_type(entry, "function")
        entry.integer("index", 0, MAX_CALLS)  # of a stream's delta; some clients send it back
        function = Fields.of(entry.get("function"), entry.path("function"))
        name = tool_name(function, "name")
        arguments = function.text("arguments")
        function.get("parsed_arguments")  # what OpenAI's client has made of them
        function.refuse_unknown()
        calls.append(ToolCall(call_id(entry, "id"), name, "{}" if arguments is None else arguments))
        entry.refuse_unknown()
    return tuple(calls)


def call_id(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if not text or len(text) > MAX_ID:
        shown = f"has {len(text)} characters" if text else "is missing"
        raise fields.error(name, f"{shown}; the id of a call has 1 to {MAX_ID}")
    return text

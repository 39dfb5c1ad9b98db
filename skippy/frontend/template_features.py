"""What a chat template can do, found out from its text and by rendering small conversations with it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs

from .errors import ApiError
from .tools import ReasoningTags, ToolFormat, reasoning_tags, tool_format

Render = Callable[[dict[str, Any]], Awaitable[str]]
"""Renders the template with a context. Raises ApiError: status 400 if the template refuses it."""

# Words that no template has by itself.
_TOOL: Final = "qZtoolqZ"
_KEY: Final = "qZkeyqZ"
_VALUE: Final = "qZvalueqZ"
_SYSTEM: Final = "qZsystemqZ"
_RESULT: Final = "qZresultqZ"
_IDS: Final = ("qZcallid0", "qZcallid1")  # nine letters and digits: Mistral's templates take no others
_ARGUMENTS: Final = re.compile(
    rf'(?<!\\)"{_KEY}"\s*:\s*"{_VALUE}"|<parameter={_KEY}>\s*{_VALUE}\s*</parameter>'
)

PROBE_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
        },
    }
]
_USER: Final = {"role": "user", "content": "Hello"}


@attrs.frozen(slots=True)
class TemplateText:
    """What a template's text tells.

    Attributes:
        format: how its model writes tool calls; that of its tools, if it has no room for any.
        reasoning: how its model marks reasoning; None: it does not.
        variables: of those that clients set, the ones it mentions.
    """

    format: ToolFormat
    reasoning: ReasoningTags | None
    variables: frozenset[str]

    @classmethod
    def of(cls, template: str) -> TemplateText:
        known = ("enable_thinking", "reasoning_effort", "tools")
        found = frozenset(name for name in known if re.search(rf"\b{name}\b", template))
        return cls(tool_format(template), reasoning_tags(template), found)


@attrs.frozen(slots=True, kw_only=True)
class TemplateFeatures:
    """What a template does with a conversation.

    Attributes:
        tools: it tells the model of tools.
        system: it has room for a system message.
        calls: it shows the calls of earlier answers.
        parallel_calls: also several of one answer.
        results: it shows what tools have answered.
        object_arguments: it wants the arguments of a call as an object, not as JSON text.
        null_content: it wants the content of an answer that only calls as null, not as an empty text.
    """

    tools: bool = False
    system: bool = False
    calls: bool = False
    parallel_calls: bool = False
    results: bool = False
    object_arguments: bool = False
    null_content: bool = False


async def probe(render: Render) -> TemplateFeatures:
    """Find out what a template does, with at most nine renderings.

    Raises:
        ApiError: it could not be tried out now.
    """

    async def attempt(messages: list[dict[str, Any]], tools: Any = None) -> str:
        try:
            return await render({"messages": messages, "tools": tools})
        except ApiError as error:
            if error.status != 400:
                raise
            return ""

    tools = PROBE_TOOLS if _TOOL in await attempt([_USER], PROBE_TOOLS) else None
    system = _SYSTEM in await attempt([{"role": "system", "content": _SYSTEM}, _USER])
    for null, as_object in ((True, True), (True, False), (False, True), (False, False)):
        shown = await attempt(_calls(1, null, as_object), tools)
        if _ARGUMENTS.search(shown) and "None" not in shown:
            both = await attempt(_calls(2, null, as_object), tools)
            return TemplateFeatures(
                tools=tools is not None,
                system=system,
                calls=True,
                parallel_calls=len(_ARGUMENTS.findall(both)) == 2 and both.count(_RESULT) == 2,
                results=_RESULT in shown,
                object_arguments=as_object,
                null_content=null,
            )
    return TemplateFeatures(tools=tools is not None, system=system)


def _calls(count: int, null: bool, as_object: bool) -> list[dict[str, Any]]:
    """A conversation with an answer of ``count`` calls, and their results."""
    arguments = {_KEY: _VALUE} if as_object else f'{{"{_KEY}": "{_VALUE}"}}'
    calls = [
        {"id": name, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        for name in _IDS[:count]
    ]
    answer = {"role": "assistant", "content": None if null else "", "tool_calls": calls}
    results = [
        {"role": "tool", "content": _RESULT, "name": _TOOL, "tool_call_id": name} for name in _IDS[:count]
    ]
    return [_USER, answer, *results]

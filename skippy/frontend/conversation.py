"""Messages and tools as chat templates take them, also those of templates that know of no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

from .errors import ApiError
from .guarding import Guard
from .schemas import ChatMessage
from .strict_json import parse_object
from .template_features import TemplateFeatures
from .tool_fields import Tool, ToolUse
from .tools import ToolCall

INSTRUCTION: Final = """\
You can call these functions. They are given with JSON schemas of their arguments:

{tools}

To call functions, answer with one JSON object and nothing else, in this form:
{{"tool_calls": [{{"name": "the function's name", "arguments": {{"argument": "value"}}}}]}}
{rule}"""
"""What the model is told where its template tells it of no tools."""
_MAY_CALL: Final = "If no function is needed, answer in plain text."
_MUST_CALL: Final = "You must call a function now."
_ONE_CALL: Final = " Make no more than one call at a time."


def template_tools(tools: Sequence[Tool], guard: Guard) -> list[dict[str, Any]]:
    """Tools in the form that templates are written for, guarded."""
    return [
        {"type": "function", "function": {key: guard.value(value) for key, value in _function(tool).items()}}
        for tool in tools
    ]


def _function(tool: Tool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }


def guarded_message(message: dict[str, Any], guard: Guard) -> dict[str, Any]:
    """A message whose every text that comes from the client is guarded."""
    result = dict(message)
    for key in ("content", "name", "reasoning_content", "thinking", "tool_call_id"):
        if isinstance(result.get(key), str):
            result[key] = guard.text(result[key])
    if "tool_calls" in message:
        result["tool_calls"] = [
            {
                "id": guard.text(call["id"]),
                "type": call["type"],
                "function": {key: guard.value(value) for key, value in call["function"].items()},
            }
            for call in message["tool_calls"]
        ]
    return result


def template_messages(
    messages: Sequence[ChatMessage], use: ToolUse, features: TemplateFeatures
) -> list[dict[str, Any]]:
    """Messages in the form that a template with these features shows them in.

    Where it has no room for tools, a system message tells of them, and calls and results become text.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    if features.calls and features.results:
        result = [
            _native(message, features, names)
            for message in (messages if features.parallel_calls else _one_by_one(messages))
        ]
    else:
        result = _as_text(messages, names)
    if use.tools and not features.tools:
        _instruct(result, use, features)
    return result


def needs_features(messages: Sequence[ChatMessage], use: ToolUse) -> bool:
    """Whether the way in which messages are shown depends on what the template can do."""
    return bool(use.tools) or any(message.role == "tool" or message.tool_calls for message in messages)


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message in which there is nothing of tools."""
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        result["name"] = message.name
    if message.reasoning is not None:
        result["reasoning_content"] = message.reasoning
        if not message.content:  # gpt-oss's template has another name for it, and room for one of the two
            result["thinking"] = message.reasoning
    return result


def _native(message: ChatMessage, features: TemplateFeatures, names: dict[str, str]) -> dict[str, Any]:
    result = plain_message(message)
    if message.tool_calls:
        if features.null_content and not message.content:
            result["content"] = None
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments(call) if features.object_arguments else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
        if message.tool_call_id in names:
            result.setdefault("name", names[message.tool_call_id])
    return result


def _arguments(call: ToolCall) -> Any:
    """The arguments as an object; as text where they are none, as may come of a call that was cut."""
    try:
        return parse_object(call.arguments.encode())
    except ApiError:
        return call.arguments


def _one_by_one(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Each call of an answer as an answer of its own, before its result."""
    waiting: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            for index, call in enumerate(waiting):
                if call.tool_calls[0].id == message.tool_call_id:
                    yield waiting.pop(index)
                    break
            yield message
            continue
        yield from waiting
        waiting = []
        if len(message.tool_calls) < 2:
            yield message
            continue
        for number, one in enumerate(message.tool_calls):
            said = message if number == 0 else attrs.evolve(message, content="", reasoning=None)
            waiting.append(attrs.evolve(said, tool_calls=(one,)))
    yield from waiting


def _as_text(messages: Sequence[ChatMessage], names: dict[str, str]) -> list[dict[str, Any]]:
    """Calls as the text that a model is told to write them in, results as what the user says."""
    result: list[dict[str, Any]] = []
    merges = False
    for message in messages:
        shown = plain_message(message)
        if message.role == "tool":
            name = names.get(message.tool_call_id or "", message.name)
            answer = {"tool_response": {"name": name, "content": message.content}}
            shown = {"role": "user", "content": json.dumps(answer, ensure_ascii=False)}
        elif message.tool_calls:
            calls = [{"name": call.name, "arguments": _arguments(call)} for call in message.tool_calls]
            text = json.dumps({"tool_calls": calls}, ensure_ascii=False)
            shown["content"] = f"{message.content}\n{text}" if message.content else text
        # Many templates insist on turns.
        if shown["role"] == "user" and merges:
            result[-1]["content"] += f"\n\n{shown['content']}"
        else:
            result.append(shown)
        merges = message.role == "tool"
    return result


def _instruct(messages: list[dict[str, Any]], use: ToolUse, features: TemplateFeatures) -> None:
    rule = _MUST_CALL if use.required else _MAY_CALL
    text = INSTRUCTION.format(
        tools="\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in use.tools),
        rule=rule if use.parallel else rule + _ONE_CALL,
    )
    role = "system" if features.system else "user"
    first = next((message for message in messages if message["role"] == role), None)
    if first is None:
        messages.insert(0, {"role": role, "content": text})
    elif role == "system":
        first["content"] = f"{first['content']}\n\n{text}"
    else:
        first["content"] = f"{text}\n\n{first['content']}"

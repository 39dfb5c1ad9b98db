"""Bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens`` → chat requests.

Field names and meanings: Anthropic's API reference. Sampling extensions have llama.cpp's names, as in chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from ..fields import U32_MAX, Fields, describe
from ..schemas import ChatRequest, read_chat
from ..strict_json import parse_object
from ..translation import SAMPLING_FIELDS, ChatBody, objects, required_text, text_or_parts

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(body: bytes) -> tuple[ChatRequest, ChatBody]:
    """The body of ``POST /v1/messages``.

    Raises:
        ApiError: 400, with ``param`` where one field is at fault.
    """
    fields = Fields(parse_object(body))
    chat = ChatBody()
    if not fields.is_given("max_tokens"):
        raise fields.error("max_tokens", "is missing; it is how many tokens the answer may have at most")
    chat.put("max_tokens", fields.integer("max_tokens", 1, U32_MAX), "max_tokens")
    for name in ("stream", *SAMPLING_FIELDS):
        if name != "temperature":
            chat.put(name, fields.get(name), name)
    if fields.is_given("temperature"):
        chat.put("temperature", fields.number("temperature", 1, 0, 1), "temperature")
    chat.put("stop", fields.array("stop_sequences") or None, "stop_sequences")
    metadata = Fields.of(fields.get("metadata") if fields.is_given("metadata") else {}, "metadata")
    chat.put("user", metadata.get("user_id"), "metadata.user_id")
    metadata.refuse_unknown()
    fields.accept_only("service_tier", ("auto", "standard_only"), "there is one service tier")
    fields.accept_only("speed", ("standard",), "there is one speed")
    for name in ("container", "context_management", "diagnostics", "inference_geo", "mcp_servers"):
        fields.accept_only(name, (), "there is nothing like it here")
    return _read(fields, chat)


def parse_count(body: bytes) -> tuple[ChatRequest, ChatBody]:
    """The body of ``POST /v1/messages/count_tokens``. Raises as :func:`parse_messages` does."""
    return _read(Fields(parse_object(body)), ChatBody())


def _read(fields: Fields, chat: ChatBody) -> tuple[ChatRequest, ChatBody]:
    """The rest: what the prompt is made of."""
    chat.put("model", fields.get("model"), "model")
    _cache_control(fields)
    if (system := text_or_parts(fields, "system", _text)) is not None:
        chat.say({"role": "system", "content": system}, "system")
    messages = objects(fields, "messages")
    if not messages:
        raise fields.error("messages", "is missing or empty; at least one message is needed")
    for message in messages:
        _message(message, chat)
    _tools(fields, chat)
    _thinking(fields)
    _output_config(fields, chat)
    fields.refuse_unknown()
    return chat.read(read_chat), chat


def _cache_control(fields: Fields) -> None:
    """Where a prompt may be cached changes no answer: all of it may, and is, where there is a cache."""
    if fields.is_given("cache_control"):
        control = Fields.of(fields.get("cache_control"), fields.path("cache_control"))
        control.accept_only("type", ("ephemeral",), "it is 'ephemeral'")
        control.accept_only("ttl", ("5m", "1h"), "it is '5m' or '1h'")
        control.refuse_unknown()


def _text(fields: Fields) -> str:
    """A block that must be text."""
    if fields.text("type") != "text":
        raise fields.other_type("text blocks are taken here")
    text = required_text(fields, "text")
    fields.accept_only("citations", ([],), "citations are not supported")
    _cache_control(fields)
    fields.refuse_unknown()
    return text


def _message(fields: Fields, chat: ChatBody) -> None:
    role = fields.text("role")
    content = fields.get("content")
    if role not in ("user", "assistant", "system"):
        shown = "missing" if role is None else repr(role[:40])
        raise fields.error("role", f"is {shown}; it must be one of user, assistant, system")
    if isinstance(content, str):
        chat.say({"role": role, "content": content}, fields.place)
    elif isinstance(content, list):
        blocks = objects(fields, "content")
        readers: dict[str, Callable[[Fields, list[Fields], ChatBody], None]] = {
            "user": _user_blocks,
            "assistant": _assistant_blocks,
            "system": _system_blocks,
        }
        readers[role](fields, blocks, chat)
    else:
        found = "missing" if content is None else describe(content)
        raise fields.error("content", f"must be a string or an array of blocks; it is {found}")
    fields.refuse_unknown()


def _system_blocks(fields: Fields, blocks: list[Fields], chat: ChatBody) -> None:
    chat.say({"role": "system", "content": "\n".join(map(_text, blocks))}, fields.place)


def _user_blocks(fields: Fields, blocks: list[Fields], chat: ChatBody) -> None:
    """Results of tools are messages of their own in chat; text around them keeps its place."""
    texts: list[str] = []

    def say_texts() -> None:
        if texts:
            chat.say({"role": "user", "content": "\n".join(texts)}, fields.place)
            texts.clear()

    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            texts.append(_text(block))
        elif kind == "tool_result":
            say_texts()
            chat.came_from(f"messages[{len(chat.messages)}].tool_call_id", f"{block.place}.tool_use_id")
            chat.say(_tool_result(block), block.place)
        else:
            raise block.other_type("text and tool_result blocks are taken here")
    if texts or not blocks:
        chat.say({"role": "user", "content": "\n".join(texts)}, fields.place)


def _tool_result(fields: Fields) -> dict[str, Any]:
    content = text_or_parts(fields, "content", _text) or ""
    if fields.boolean("is_error"):  # chat has no other way to say so
        content = f"Error: {content}"
    call_id = required_text(fields, "tool_use_id")
    _cache_control(fields)
    fields.refuse_unknown()
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _assistant_blocks(fields: Fields, blocks: list[Fields], chat: ChatBody) -> None:
    texts: list[str] = []
    calls: list[tuple[dict[str, Any], str]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            texts.append(_text(block))
        elif kind == "tool_use":
            calls.append((_tool_use(block), block.place))
        elif kind == "thinking":
            thoughts.append(required_text(block, "thinking"))
            block.text("signature")
            block.refuse_unknown()
        else:
            raise block.other_type("text, thinking and tool_use blocks are taken here")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["content"] = message["content"] or None
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    chat.say(message, fields.place)
    for call, place in calls:
        chat.call(call, place)


def _tool_use(fields: Fields) -> dict[str, Any]:
    arguments = fields.get("input")
    if not isinstance(arguments, dict):
        raise fields.error("input", f"must be an object, not {describe(arguments)}")
    function = {
        "name": required_text(fields, "name"),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    call = {"id": required_text(fields, "id"), "type": "function", "function": function}
    fields.accept_only("caller", ({"type": "direct"},), "tools are called by the model itself")
    _cache_control(fields)
    fields.refuse_unknown()
    return call


def _tools(fields: Fields, chat: ChatBody) -> None:
    tools: list[dict[str, Any]] = []
    for tool in objects(fields, "tools"):
        kind = tool.text("type")
        if kind not in (None, "custom"):
            text = f"is {kind[:40]!r}, which is not supported; tools are the client's own"
            raise tool.error("type", text, code="unsupported_model_feature")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
            "strict": tool.get("strict"),
        }
        if not tool.is_given("input_schema"):
            raise tool.error("input_schema", "is missing; it is the JSON schema of the tool's input")
        _cache_control(tool)
        tool.boolean("eager_input_streaming")
        tool.accept_only("defer_loading", (False,), "tools are not searched")
        tool.accept_only("allowed_callers", (["direct"],), "tools are called by the model itself")
        tool.refuse_unknown()
        path = f"tools[{len(tools)}]"
        chat.came_from(f"{path}.function", path)
        chat.came_from(f"{path}.function.parameters", f"{path}.input_schema")
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    if tools:
        chat.data["tools"] = tools
    if fields.is_given("tool_choice"):
        _tool_choice(Fields.of(fields.get("tool_choice"), "tool_choice"), chat)


def _tool_choice(fields: Fields, chat: ChatBody) -> None:
    kind = fields.text("type") or ""
    if kind == "tool":
        function = {"name": required_text(fields, "name")}
        chat.data["tool_choice"] = {"type": "function", "function": function}
        chat.came_from("tool_choice.function", "tool_choice")
    elif kind in _CHOICES:
        chat.data["tool_choice"] = _CHOICES[kind]
    else:
        raise fields.error("type", f"is {kind[:40]!r}; it must be one of auto, any, tool, none")
    if fields.is_given("disable_parallel_tool_use"):
        chat.put(
            "parallel_tool_calls",
            not fields.boolean("disable_parallel_tool_use"),
            "tool_choice.disable_parallel_tool_use",
        )
    fields.refuse_unknown()


def _thinking(fields: Fields) -> None:
    if fields.is_given("thinking"):
        thinking = Fields.of(fields.get("thinking"), "thinking")
        thinking.accept_only("type", ("disabled",), "how much the model thinks is not controlled")
        thinking.refuse_unknown()


def _output_config(fields: Fields, chat: ChatBody) -> None:
    if not fields.is_given("output_config"):
        return
    config = Fields.of(fields.get("output_config"), "output_config")
    chat.put("reasoning_effort", config.get("effort"), "output_config.effort")
    if config.is_given("format"):
        form = Fields.of(config.get("format"), "output_config.format")
        form.accept_only("type", ("json_schema",), "it is 'json_schema'")
        schema = {"name": "output", "schema": form.get("schema")}
        form.refuse_unknown()
        chat.put("response_format", {"type": "json_schema", "json_schema": schema}, "output_config.format")
        chat.came_from("response_format.json_schema", "output_config.format")
    config.refuse_unknown()

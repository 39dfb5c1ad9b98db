"""Bodies of ``POST /v1/responses`` → chat requests.

Field names and meanings: OpenAI's API reference. Sampling extensions have llama.cpp's names, as in chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from ..fields import Fields, describe
from ..schemas import ChatRequest, read_chat
from ..strict_json import parse_object
from ..translation import SAMPLING_FIELDS, ChatBody, objects, required_text, text_or_parts

_AS_THEY_ARE: Final = (
    "model",
    "stream",
    "user",
    "safety_identifier",
    "service_tier",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_format",
    *SAMPLING_FIELDS,
)
"""Parameters that have the same name and meaning in chat."""

_LOGPROBS: Final = "message.output_text.logprobs"
_ROLES: Final = ("user", "system", "developer", "assistant")


@attrs.frozen(slots=True)
class Conversation:
    """A chat request, the body that it was read from, and its messages without the instructions."""

    request: ChatRequest
    body: ChatBody
    messages: list[dict[str, Any]]


@attrs.frozen(slots=True, kw_only=True)
class ResponsesBody:
    """A request as it was sent, checked as far as that goes without what it refers to.

    Attributes:
        data: the body.
        size: in bytes.
        previous: id of the response whose conversation it goes on with.
        store: whether the response can be asked for later.
    """

    data: dict[str, Any]
    size: int
    previous: str | None
    store: bool

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        value = self.data["input"]
        if isinstance(value, str):
            value = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
        return [{**item, "id": item.get("id") or f"item_{index}"} for index, item in enumerate(value)]

    def echo(self, request: ChatRequest) -> dict[str, Any]:
        """What the response repeats of the request, with the defaults that hold."""
        data, sampling = self.data, request.sampling
        return {
            "instructions": data.get("instructions"),
            "max_output_tokens": request.max_tokens,
            "metadata": data.get("metadata") or {},
            "parallel_tool_calls": data.get("parallel_tool_calls", True) is not False,
            "previous_response_id": self.previous,
            "prompt_cache_key": request.cache_key,
            "reasoning": {"effort": None, "summary": None, **(data.get("reasoning") or {})},
            "safety_identifier": data.get("safety_identifier"),
            "service_tier": "default",
            "store": self.store,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **(data.get("text") or {})},
            "tool_choice": data.get("tool_choice") or "auto",
            "tools": data.get("tools") or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": data.get("user"),
        }

    def chat(self, history: Sequence[dict[str, Any]]) -> Conversation:
        """What this body asks for.

        Args:
            history: messages of the conversation before.

        Raises:
            ApiError: 400, with ``param`` where one field is at fault.
        """
        fields, body = Fields(self.data), ChatBody()
        body.came_from("messages", "input")
        if (instructions := fields.text("instructions")) is not None:
            body.say({"role": "system", "content": instructions}, "instructions")
        begin = len(body.messages)
        for message in history:
            body.say(message, "previous_response_id")
        _input(fields, body)
        for name in _AS_THEY_ARE:
            body.put(name, fields.get(name), name)
        body.put("max_completion_tokens", fields.get("max_output_tokens"), "max_output_tokens")
        _text(fields, body)
        _tools(fields, body)
        _reasoning(fields, body)
        _logprobs(fields, body)
        _refuse_features(fields)
        fields.refuse_unknown()
        return Conversation(body.read(read_chat), body, body.messages[begin:])


def parse_responses(body: bytes) -> ResponsesBody:
    """The body of ``POST /v1/responses``; the rest of the checks are :meth:`ResponsesBody.chat`'s.

    Raises:
        ApiError: 400.
    """
    data = parse_object(body)
    fields = Fields(data)
    return ResponsesBody(
        data=data,
        size=len(body),
        previous=fields.text("previous_response_id"),
        store=fields.boolean("store", default=True),
    )


def _input(fields: Fields, body: ChatBody) -> None:
    value = fields.get("input")
    if isinstance(value, str):
        body.say({"role": "user", "content": value}, "input")
    elif isinstance(value, list) and value:
        for item in objects(fields, "input"):
            _item(item, body)
    else:
        found = "missing" if value is None else "empty" if value == [] else describe(value)
        raise fields.error("input", f"must be a string or an array of items; it is {found}")


def _item(fields: Fields, body: ChatBody) -> None:
    origin = fields.place
    kind = fields.text("type") or ("message" if fields.is_given("role") else "")
    fields.text("id")
    fields.accept_only("status", ("completed", "incomplete", "in_progress"), "it is one of a finished item")
    if kind == "message":
        _message(fields, body, origin)
    elif kind == "function_call":
        fields.get("parsed_arguments")  # what OpenAI's client has made of them
        call = {
            "id": required_text(fields, "call_id"),
            "type": "function",
            "function": {
                "name": required_text(fields, "name"),
                "arguments": required_text(fields, "arguments"),
            },
        }
        if _last_said(body) is None:
            body.say({"role": "assistant", "content": None}, origin)
        body.call(call, origin, "call_id")
    elif kind == "reasoning":
        thought = "".join(map(_thought, objects(fields, "content")))
        fields.accept_only("summary", ([],), "reasoning is not summarised here")
        fields.accept_only("encrypted_content", (), "reasoning is not encrypted here")
        body.say({"role": "assistant", "content": None, "reasoning_content": thought}, origin)
    elif kind == "function_call_output":
        output = text_or_parts(fields, "output", _part)
        if output is None:
            raise fields.error("output", "is missing; a string is needed")
        call_id = required_text(fields, "call_id")
        body.came_from(f"messages[{len(body.messages)}].tool_call_id", f"{origin}.call_id")
        body.say({"role": "tool", "tool_call_id": call_id, "content": output}, origin)
    else:
        shown = f"is {kind[:40]!r}, which is not supported" if kind else "is missing"
        text = f"{shown}; items are messages, reasoning, function_call and function_call_output"
        raise fields.error("type", text, code="unsupported_model_feature" if kind else "")
    fields.refuse_unknown()


def _message(fields: Fields, body: ChatBody, origin: str) -> None:
    role = fields.text("role")
    if role not in _ROLES:
        shown = "missing" if role is None else repr(role[:40])
        raise fields.error("role", f"is {shown}; it must be one of {', '.join(_ROLES)}")
    fields.accept_only("phase", ("commentary", "final_answer"), "it is one of an output message")
    content = text_or_parts(fields, "content", _part)
    if content is None:
        raise fields.error("content", "is missing; a string or an array of parts is needed")
    said = _last_said(body)
    if role == "assistant" and said is not None and said["content"] is None and "tool_calls" not in said:
        body.messages[-1] = {**said, "content": content}  # so far it only thought
    else:
        body.say({"role": role, "content": content}, origin)


def _last_said(body: ChatBody) -> dict[str, Any] | None:
    """The last message, if it is the assistant's: an answer of several items is one of chat."""
    last = body.messages[-1] if body.messages else None
    return last if last is not None and last["role"] == "assistant" else None


def _thought(fields: Fields) -> str:
    fields.accept_only("type", ("reasoning_text",), "it is 'reasoning_text'")
    text = required_text(fields, "text")
    fields.refuse_unknown()
    return text


def _part(fields: Fields) -> str:
    kind = fields.text("type")
    if kind == "refusal":
        text = required_text(fields, "refusal")
    elif kind in ("input_text", "output_text", "text"):
        text = required_text(fields, "text")
        # Of what a response said: annotations there are none, probabilities change no prompt, nor does what
        # OpenAI's client has made of the text.
        fields.accept_only("annotations", ([],), "text has no annotations here")
        fields.array("logprobs")
        fields.get("parsed")
    else:
        raise fields.other_type("only input_text, output_text and refusal parts are taken")
    fields.refuse_unknown()
    return text


def _text(fields: Fields, body: ChatBody) -> None:
    if not fields.is_given("text"):
        return
    text = Fields.of(fields.get("text"), "text")
    body.put("verbosity", text.get("verbosity"), "text.verbosity")
    if text.is_given("format"):
        form = Fields.of(text.get("format"), "text.format")
        if form.get("type") == "json_schema":
            schema = {name: form.get(name) for name in ("name", "description", "schema", "strict")}
            body.put("response_format", {"type": "json_schema", "json_schema": schema}, "text.format")
            body.came_from("response_format.json_schema", "text.format")
        else:
            body.put("response_format", {"type": form.get("type")}, "text.format")
        form.refuse_unknown()
    text.refuse_unknown()


def _tools(fields: Fields, body: ChatBody) -> None:
    tools: list[dict[str, Any]] = []
    for tool in objects(fields, "tools"):
        if tool.text("type") != "function":
            raise tool.other_type("tools are functions")
        function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
        tool.refuse_unknown()
        path = f"tools[{len(tools)}]"
        body.came_from(f"{path}.function", path)
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    if tools:
        body.data["tools"] = tools
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = Fields.of(choice, "tool_choice")
        named.get("type")
        function = {"name": required_text(named, "name")}
        named.refuse_unknown()
        choice = {"type": "function", "function": function}
        body.came_from("tool_choice.function", "tool_choice")
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = _allowed_tools(Fields.of(choice, "tool_choice"), body)
    body.put("tool_choice", choice, "tool_choice")


def _allowed_tools(choice: Fields, body: ChatBody) -> dict[str, Any]:
    """What chat has in a member of its own, and functions by their names as ever."""
    tools: list[dict[str, Any]] = []
    for tool in objects(choice, "tools"):
        if tool.text("type") != "function":
            raise tool.other_type("tools are functions")
        body.came_from(f"tool_choice.allowed_tools.tools[{len(tools)}].function", tool.place)
        tools.append({"type": "function", "function": {"name": required_text(tool, "name")}})
        tool.refuse_unknown()
    body.came_from("tool_choice.allowed_tools", "tool_choice")
    chosen = {"type": choice.get("type"), "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    choice.refuse_unknown()
    return chosen


def _reasoning(fields: Fields, body: ChatBody) -> None:
    if not fields.is_given("reasoning"):
        return
    reasoning = Fields.of(fields.get("reasoning"), "reasoning")
    body.put("reasoning_effort", reasoning.get("effort"), "reasoning.effort")
    for name in ("summary", "generate_summary"):
        reasoning.accept_only(name, (), "reasoning is not summarised")
    reasoning.refuse_unknown()


def _logprobs(fields: Fields, body: ChatBody) -> None:
    included = fields.array("include") or []
    for index, name in enumerate(included):
        if name != _LOGPROBS:
            text = f"is not supported: only {_LOGPROBS!r} can be included"
            raise fields.error(f"include[{index}]", text, code="unsupported_model_feature")
    top = fields.integer("top_logprobs", 0, 20)
    if top is not None and not included:
        raise fields.error("top_logprobs", f"needs {_LOGPROBS!r} in include")
    if included:
        body.put("logprobs", True, "include")
        body.put("top_logprobs", top, "top_logprobs")


def _refuse_features(fields: Fields) -> None:
    """Accept what cannot change the answer, refuse the rest by name."""
    fields.get("previous_response_id")
    fields.get("store")
    fields.accept_only("background", (False,), "responses are made while the client waits")
    fields.accept_only("truncation", ("disabled",), "a conversation that is too long is refused, not cut")
    fields.accept_only("conversation", (), "there are no conversations; use previous_response_id")
    fields.accept_only("prompt_cache_options", (), "prompt caching cannot be controlled")
    fields.accept_only("prompt", (), "there are no stored prompts")
    fields.accept_only("max_tool_calls", (), "there are no built-in tools")
    for name in ("context_management", "background_options", "access_programs", "image", "moderation"):
        fields.accept_only(name, (), "there is nothing like it here")
    if fields.is_given("stream_options"):
        options = Fields.of(fields.get("stream_options"), "stream_options")
        options.accept_only("include_obfuscation", (False,), "events are not padded")
        options.refuse_unknown()
        if not fields.boolean("stream"):
            raise fields.error("stream_options", "is only allowed when stream is true")

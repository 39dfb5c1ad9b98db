"""Request bodies of the chat and completions routes, parsed strictly.

Every field is honoured, accepted because it cannot change the answer, or refused by name. Nothing is
ignored: an unknown field is an error that suggests the nearest known one.
Field names and meanings: OpenAI's API reference; extensions are llama.cpp's names.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import attrs

from skippy.protocol import SamplingConfig

from .chat_settings import ChatSettings, parse_chat_settings
from .choices import MAX_CHOICES
from .constraints import parse_constraint
from .errors import ApiError
from .fields import U32_MAX, Fields, describe
from .generation import Constraint
from .logprobs import parse_chat_logprobs, parse_completion_logprobs
from .prompts import parse_prompts
from .sampling import DEFAULT_SAMPLING, read_sampling
from .strict_json import parse_object
from .tool_fields import call_id, parse_calls
from .tools import ToolCall

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024

MAX_MESSAGES: Final = 4096

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@attrs.frozen(slots=True)
class ChatMessage:
    """One message: text only. ``developer`` has become ``system``; text parts are joined by newlines.

    Attributes:
        tool_calls: of an assistant.
        tool_call_id: of a tool's message: the call that it answers.
        reasoning: what the assistant thought before it said ``content``.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@attrs.frozen(slots=True, kw_only=True)
class CommonRequest:
    """What chat and completions share.

    Attributes:
        model: as the client spelled it; not checked here.
        stream: whether the answer is a stream of server-sent events.
        include_usage: whether a stream ends with a usage chunk.
        stop: texts that end the generation; they are not part of the answer.
        max_tokens: tokens to generate at most, or None for the server's default. It may be far more than the
            context holds: some clients write 2**32 - 1 for the rest of it.
        sampling: enabled sampling block; the defaults in it are for a model that recommends none.
        said: names of its members that the request itself says.
        constraint: what the answer is held to; None: nothing.
        cache_key: what the client wants its cached prompts kept apart by; None: nothing.
        n: choices for each prompt.
        top_logprobs: as :class:`skippy.frontend.generation.GenerationRequest` has it.
        cache_retention: ``in_memory``, ``24h`` or None: how long the client wants them kept at least.
    """

    model: str
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    max_tokens: int | None
    sampling: SamplingConfig
    said: frozenset[str] = frozenset()
    n: int = 1
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    cache_key: str | None = None
    cache_retention: str | None = None


@attrs.frozen(slots=True, kw_only=True)
class ChatRequest(CommonRequest):
    messages: tuple[ChatMessage, ...]
    settings: ChatSettings = attrs.field(factory=ChatSettings)


@attrs.frozen(slots=True, kw_only=True)
class CompletionRequest(CommonRequest):
    """Each prompt is text, or token ids that are taken as they are; ``echo``: answers begin with it."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False


def parse_chat(body: bytes) -> ChatRequest:
    """The body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: 400, with ``param`` where one field is at fault.
    """
    return read_chat(parse_object(body))


def read_chat(data: dict[str, Any]) -> ChatRequest:
    """A chat request, also one that another route's was translated to. Raises as :func:`parse_chat` does."""
    fields = Fields(data)
    common = _common(fields, ("max_completion_tokens", "max_tokens"))
    common["top_logprobs"] = parse_chat_logprobs(fields)
    settings = parse_chat_settings(fields)
    _refuse_chat_features(fields)
    messages = fields.array("messages")
    if not messages:
        raise fields.error("messages", "is missing or empty; at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise fields.error("messages", f"has {len(messages)} entries; at most {MAX_MESSAGES} are allowed")
    parsed = tuple(_message(Fields.of(value, f"messages[{i}]")) for i, value in enumerate(messages))
    fields.refuse_unknown()
    return ChatRequest(messages=parsed, settings=settings, **common)


def parse_completion(body: bytes) -> CompletionRequest:
    """The body of ``POST /v1/completions``.

    Raises:
        ApiError: 400, with ``param`` where one field is at fault.
    """
    fields = Fields(parse_object(body))
    echo, top_logprobs = fields.boolean("echo"), parse_completion_logprobs(fields)
    if echo and top_logprobs is not None:  # first: those who want it ask for no tokens, as a rule
        text = "is not supported with logprobs: those of the prompt's own tokens are not computed"
        raise fields.error("echo", text, code="unsupported_model_feature")
    common = {**_common(fields, ("max_tokens",)), "top_logprobs": top_logprobs}
    n = common["n"]
    fields.accept_only("best_of", (n,), f"all choices are returned, so best_of must be n, which is {n}")
    fields.accept_only("suffix", ("",), "text is only generated after the prompt")
    prompts = parse_prompts(fields)
    if n * len(prompts) > MAX_CHOICES:
        text = f"has {len(prompts)} entries with n = {n}; at most {MAX_CHOICES} choices are generated at once"
        raise fields.error("prompt", text)
    fields.refuse_unknown()
    return CompletionRequest(prompts=prompts, echo=echo, **common)


def _common(fields: Fields, limit_names: tuple[str, ...]) -> dict[str, Any]:
    """Constructor arguments for :class:`CommonRequest`; the first given limit wins."""
    model = required_model(fields)
    limits = [_limit(fields, name) for name in (*limit_names, "n_predict")]
    fields.accept_only("cache_prompt", (True,), "what cached prompts are used for changes no answer")
    fields.accept_only("id_slot", (-1,), "requests are given lanes as these become free")
    fields.accept_only("min_keep", (0, 1), "samplers keep at least one token")
    n = fields.integer("n", 1, MAX_CHOICES)
    stream = fields.boolean("stream")
    include_usage = _stream_options(fields, stream)
    fields.text("user")
    constraint, said = parse_constraint(fields), read_sampling(fields)
    sampling = attrs.evolve(DEFAULT_SAMPLING, **said)
    if constraint is not None and sampling.ignores_eos:
        raise fields.error(
            "ignore_eos", f"must not be true where {constraint.param} says how the answer ends"
        )
    retention = ("in_memory", "24h")
    fields.accept_only("prompt_cache_retention", retention, f"it is one of {', '.join(retention)}")
    return {
        "model": model,
        "stream": stream,
        "include_usage": include_usage,
        "stop": _stops(fields),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "sampling": sampling,
        "said": frozenset(said),
        "constraint": constraint,
        "n": n or 1,
        "cache_key": fields.text("prompt_cache_key"),
        "cache_retention": fields.get("prompt_cache_retention"),
    }


def _limit(fields: Fields, name: str) -> int | None:
    """How many tokens an answer may have; where llama.cpp's server reads it, too, -1 is no limit."""
    if name == "max_completion_tokens":
        return fields.integer(name, 1, U32_MAX)
    limit = fields.integer(name, -1, U32_MAX)
    if limit == 0:
        raise fields.error(name, "is 0; it must be at least 1, or -1 for the rest of the context")
    return None if limit == -1 else limit


def _stream_options(fields: Fields, stream: bool) -> bool:
    value = fields.get("stream_options")
    if value is None:
        return False
    options = Fields.of(value, "stream_options")
    include_usage = options.boolean("include_usage")
    options.accept_only("include_obfuscation", (False,), "chunks are not padded")
    options.refuse_unknown()
    if not stream:
        raise fields.error("stream_options", "is only allowed when stream is true")
    return include_usage


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise fields.error("stop", f"must be a string or an array of strings, not {describe(value)}")
    if len(stops) > MAX_STOPS:
        raise fields.error("stop", f"has {len(stops)} entries; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        name = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(stop, str):
            raise fields.error(name, f"must be a string, not {describe(stop)}")
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise fields.error(name, f"must be 1 to {MAX_STOP_CHARACTERS} characters long")
    return tuple(stops)


def _refuse_chat_features(fields: Fields) -> None:
    """Accept what cannot change the answer, refuse the rest by name."""
    fields.accept_only("modalities", (["text"],), "only text is produced")
    fields.accept_only("audio", (), "only text is produced")
    fields.accept_only("prediction", (), "predicted outputs are not used")
    fields.accept_only("moderation", (), "no moderation is done")
    fields.accept_only("web_search_options", (), "there is no web search")
    fields.accept_only("verbosity", ("medium",), "verbosity is not controlled")
    fields.accept_only("store", (False,), "completions are not stored")
    fields.accept_only("service_tier", ("auto", "default"), "there is one service tier")
    fields.accept_only("prompt_cache_options", (), "prompt caching cannot be controlled")
    fields.text("safety_identifier")
    if fields.is_given("metadata"):
        metadata = fields.get("metadata")
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise fields.error("metadata", "must be an object whose values are strings")


def _message(fields: Fields) -> ChatMessage:
    role_name = fields.text("role")
    role = _ROLES.get(role_name or "")
    if role is None:
        known = ", ".join(_ROLES)
        if role_name == "function":
            text = "is 'function', which is not supported: it was replaced by 'tool'"
            raise fields.error("role", text, code="unsupported_model_feature")
        shown = "missing" if role_name is None else repr(role_name[:40])
        raise fields.error("role", f"is {shown}; it must be one of {known}")
    name = fields.text("name")
    content = _content(fields, role)
    fields.accept_only("audio", (), "messages carry text only")
    fields.accept_only("function_call", (), "it was replaced by tool_calls")
    fields.accept_only("annotations", ([],), "messages carry text only")
    calls: tuple[ToolCall, ...] = ()
    reasoning = answers = None
    if role == "assistant":
        calls, reasoning = parse_calls(fields), fields.text("reasoning_content")
        content = "\n".join(filter(None, (content, fields.text("refusal"))))
        fields.get("parsed")  # what OpenAI's client has made of the content
    else:
        fields.accept_only("refusal", (), "only the assistant refuses")
    if role == "tool":
        answers = call_id(fields, "tool_call_id")
    fields.refuse_unknown()
    return ChatMessage(role, content, name, calls, answers, reasoning)


def _content(fields: Fields, role: Role) -> str:
    value = fields.get("content")
    if isinstance(value, str):
        return value
    if value is None:
        if role == "assistant":
            return ""
        raise fields.error("content", "is missing; a string or an array of text parts is needed")
    if not isinstance(value, list):
        raise fields.error("content", f"must be a string or an array of parts, not {describe(value)}")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    return "\n".join(
        _text_part(Fields.of(part, f"{fields.path('content')}[{index}]"), kinds)
        for index, part in enumerate(value)
    )


def _text_part(fields: Fields, kinds: tuple[str, ...]) -> str:
    kind = fields.text("type")
    if kind not in kinds:
        taken = " and ".join(map(repr, kinds))
        raise fields.other_type(f"only parts of type {taken} are taken")
    text = fields.text(kind)
    if text is None:
        raise fields.error(kind, "is missing")
    fields.refuse_unknown()
    return text


def required_model(fields: Fields) -> str:
    """The model that a request names."""
    model = fields.text("model")
    if not model:
        raise fields.error("model", "is missing; GET /v1/models lists what is served")
    return model


def check_model(model: str, served: str) -> None:
    """Raise the 404 of an unknown model."""
    if model != served:
        message = f"the model {model[:200]!r} does not exist here; this server has {served!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")

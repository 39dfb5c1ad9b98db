"""The JSON of ``/v1/messages``: whole messages, their events, and Anthropic's error envelope."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Final

from ..choices import ChoiceResult, Piece
from ..errors import ApiError
from ..generation import Timings
from ..responses import dump, timings_object
from ..running import Usage
from ..tools import CallArguments, CallBegin, CallBroken, CallEnd, Content, Delta, Reasoning

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS: Final = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
# Of each type of block: the member that its deltas add up to, and how a delta is called.
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def error_envelope(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """An error as Anthropic words it. Ours have the parameter and our own word for it besides."""
    kind = _TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    shown = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": shown, "request_id": request_id}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), dump(data))


class MessageShape:
    """One message. Implements :class:`skippy.frontend.responses.ResponseShape`."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._content: list[dict[str, Any]] = []
        """Blocks that are complete."""
        self._count = 0
        """Blocks that have begun."""
        self._block: dict[str, Any] | None = None
        """The one that is not complete."""
        self._texts: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    # -- the shape -------------------------------------------------------------------------------------

    def opening(self, usage: Usage) -> bytes:
        return _event({"type": "message_start", "message": self._message(usage, [])})

    def delta(self, choice: int, text: str) -> bytes:
        return self._begin("text", text="", citations=None) + self._more(text)

    def piece(self, piece: Piece) -> bytes:
        if piece.finish_reason is not None:
            self._stop_sequence = piece.stop
            self._stop_reason = "stop_sequence" if piece.stop else _STOP_REASONS[piece.finish_reason]
        events = self.delta(piece.choice, piece.text) if piece.text else b""
        return events + b"".join(map(self._take, piece.deltas))

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence},
            "usage": _usage_object(usage),
            "timings": timings_object(timings, usage),
        }
        return self._end() + _event(end) + _event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return _event(error_envelope(error))

    def whole(self, choices: Sequence[ChoiceResult], usage: Usage, timings: Timings) -> dict[str, Any]:
        choice = choices[0]
        thoughts = tuple(delta for delta in choice.deltas if isinstance(delta, Reasoning))
        calls = tuple(delta for delta in choice.deltas if not isinstance(delta, Reasoning))
        self.piece(Piece(0, "", (), None, None, thoughts))
        self.piece(Piece(0, choice.text, (), choice.finish_reason, choice.stop, calls))
        self._end()
        return {**self._message(usage, self._content), "timings": timings_object(timings, usage)}

    # -- blocks ----------------------------------------------------------------------------------------

    def _take(self, delta: Delta) -> bytes:
        match delta:
            case Content(text):
                return self.delta(0, text)
            case Reasoning(text):
                return self._begin("thinking", thinking="", signature="") + self._more(text)
            case CallBegin(_, call_id, name):
                return self._close() + self._begin("tool_use", id=call_id, name=name, input={})
            case CallArguments(_, text):
                return self._more(text)
            case CallEnd():
                return self._close()
            case CallBroken():
                return self._close(void=True)

    def _begin(self, kind: str, **members: Any) -> bytes:
        """Open a block of a type, unless one is open."""
        if self._block is not None and self._block["type"] == kind:
            return b""
        events = self._close()
        self._block = {"type": kind, **members}
        start = {"type": "content_block_start", "index": self._count, "content_block": self._block}
        self._count += 1
        return events + _event(start)

    def _more(self, text: str) -> bytes:
        assert self._block is not None
        self._texts.append(text)
        kind, member = _DELTAS[self._block["type"]]
        delta = {"type": kind, member: text}
        return _event({"type": "content_block_delta", "index": self._count - 1, "delta": delta})

    def _close(self, *, void: bool = False) -> bytes:
        """End the open block, if there is one. ``void``: it is no part of the message after all."""
        block, self._block = self._block, None
        if block is None:
            return b""
        text = "".join(self._texts)
        self._texts.clear()
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:
                void = True  # its end is missing
        else:
            block[block["type"]] = text
        if not void:
            self._content.append(block)
        return _event({"type": "content_block_stop", "index": self._count - 1})

    def _end(self) -> bytes:
        # An answer without a word is a text without a word.
        events = b"" if self._content or self._block else self._begin("text", text="", citations=None)
        return events + self._close()

    def _message(self, usage: Usage, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _usage_object(usage),
        }


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Here, tokens of the input are those that were not read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }

"""The JSON of ``/v1/messages``: whole messages, their events, and Anthropic's error envelope."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from ..choices import ChoiceResult, Piece
from ..errors import ApiError
from ..generation import Timings
from ..responses import dump, timings_object
from ..running import Usage

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
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
        self._block: dict[str, Any] | None = None
        """The one that is not."""
        self._texts: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def opening(self, usage: Usage) -> bytes:
        return _event({"type": "message_start", "message": self._message(usage, [])})

    def delta(self, choice: int, text: str) -> bytes:
        return self._open_text() + self._more({"type": "text_delta", "text": text}, text)

    def piece(self, piece: Piece) -> bytes:
        if piece.finish_reason is not None:
            self._stop_sequence = piece.stop
            reasons = {"length": "max_tokens", "stop": "stop_sequence" if piece.stop else "end_turn"}
            self._stop_reason = reasons[piece.finish_reason]
        return self.delta(piece.choice, piece.content) if piece.content else b""

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        events = b"" if self._content or self._block else self._open_text()
        events += self._close()
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence},
            "usage": _usage_object(usage),
            "timings": timings_object(timings, usage),
        }
        return events + _event(end) + _event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return _event(error_envelope(error))

    def whole(self, choices: Sequence[ChoiceResult], usage: Usage, timings: Timings) -> dict[str, Any]:
        choice = choices[0]
        self.piece(Piece(0, choice.text, (), choice.finish_reason, choice.stop))
        self.closing(usage, timings)
        return {**self._message(usage, self._content), "timings": timings_object(timings, usage)}

    def _message(self, usage: Usage, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _usage_object(usage),
        }

    def _open_text(self) -> bytes:
        if self._block is not None:
            return b""
        self._block = {"type": "text", "text": "", "citations": None}
        start = {"type": "content_block_start", "index": len(self._content), "content_block": self._block}
        return _event(start)

    def _more(self, delta: dict[str, Any], text: str) -> bytes:
        self._texts.append(text)
        return _event({"type": "content_block_delta", "index": len(self._content), "delta": delta})

    def _close(self) -> bytes:
        block, self._block = self._block, None
        if block is None:
            return b""
        block["text"] = "".join(self._texts)
        self._texts.clear()
        self._content.append(block)
        return _event({"type": "content_block_stop", "index": len(self._content) - 1})


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Here, tokens of the input are those that were not read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }

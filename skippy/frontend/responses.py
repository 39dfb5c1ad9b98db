"""The JSON of answers: whole completions, stream chunks and server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Protocol

from .errors import ApiError
from .generation import FinishReason, Timings
from .running import Usage

DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients of server-sent events skip."""


# Kept: json.dumps makes a new one with every call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# No text of ours, so the last place in a chunk where it stands is that of the text.
_PLACEHOLDER = "\0"


def dump(value: Any) -> bytes:
    return _encode(value).encode("utf-8")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return event(error.envelope())


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_object(timings: Timings, usage: Usage) -> dict[str, Any]:
    """How long the parts of a generation took; names as llama.cpp's server and its relatives have them.

    The prompt's time is all from having a lane to the first token, and counts the tokens that were computed;
    the answer's is that from its first token to its end.
    """
    return {
        "queue_wait_ms": round(timings.queue_ms, 3),
        "cache_n": usage.cached_tokens,
        "cache_restore_ms": round(timings.restore_ms, 3),
        "suffix_prefill_n": timings.prefill_tokens,
        "suffix_prefill_ms": round(timings.prefill_ms, 3),
        "prompt_n": usage.prompt_tokens - usage.cached_tokens,
        "prompt_ms": round(timings.prompt_ms, 3),
        "prompt_per_second": _per_second(usage.prompt_tokens - usage.cached_tokens, timings.prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(timings.answer_ms, 3),
        "predicted_per_second": _per_second(usage.completion_tokens - 1, timings.answer_ms),
    }


def _per_second(count: int, ms: float) -> float:
    return round(1000 * count / ms, 3) if count > 0 and ms > 0 else 0.0


class ResponseShape(Protocol):
    """How one route words its answer. One instance per response: all its chunks have the same id and time."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before the text."""

    def delta(self, text: str) -> bytes:
        """The event of a piece of text."""

    def finish(self, reason: FinishReason | None) -> dict[str, Any]: ...

    def usage(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, text: str, reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        """The answer of a request that does not stream."""


class _Shape:
    prefix = ""
    chunk_object = ""
    whole_object = ""

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        # All chunks of text are the same but for the text, so only that is encoded for each of them.
        self._before, _, self._behind = event(self._delta(_PLACEHOLDER)).rpartition(dump(_PLACEHOLDER))

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, text: str) -> bytes:
        return self._before + dump(text) + self._behind

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        # With include_usage every chunk has the member, null in all but the last.
        return {**chunk, "usage": None} if self._include_usage else chunk

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage_object(usage)}

    def _whole(self, choice: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [choice],
            "usage": usage_object(usage),
        }


class ChatShape(_Shape):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def _choice(self, delta: dict[str, Any], reason: FinishReason | None = None) -> dict[str, Any]:
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}])

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice({"role": "assistant", "content": ""})]

    def _delta(self, text: str) -> dict[str, Any]:
        return self._choice({"content": text})

    def finish(self, reason: FinishReason | None) -> dict[str, Any]:
        return self._choice({}, reason)

    def whole(self, text: str, reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._whole({"index": 0, "message": message, "logprobs": None, "finish_reason": reason}, usage)


class CompletionShape(_Shape):
    """``/v1/completions``."""

    prefix = "cmpl-"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def _choice(self, text: str, reason: FinishReason | None = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def _delta(self, text: str) -> dict[str, Any]:
        return self._chunk([self._choice(text)])

    def finish(self, reason: FinishReason | None) -> dict[str, Any]:
        return self._chunk([self._choice("", reason)])

    def whole(self, text: str, reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        return self._whole(self._choice(text, reason), usage)

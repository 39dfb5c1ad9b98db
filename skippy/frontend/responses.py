"""The JSON of answers: whole completions, stream chunks and server-sent events."""

from __future__ import annotations

import abc
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .choices import ChoiceResult, Piece, ScoredToken
from .errors import ApiError
from .generation import Timings
from .running import Usage
from .tools import CallArguments, CallBegin, Content, Delta, Reasoning, collect

Scorer = Callable[[Sequence[ScoredToken]], dict[str, Any]]

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
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
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

    def opening(self, usage: Usage) -> bytes:
        """Events that come before the text, once there is any. The counts of the prompt are known by then."""

    def delta(self, choice: int, text: str) -> bytes:
        """The event of a piece that is text and nothing else; empty where there is nothing to tell of it."""

    def piece(self, piece: Piece) -> bytes:
        """The events of any other piece."""

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        """All that follows the last piece of the last choice."""

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream whose answer has failed."""

    def whole(self, choices: Sequence[ChoiceResult], usage: Usage, timings: Timings) -> dict[str, Any]:
        """The answer of a request that does not stream."""


class _Shape(abc.ABC):
    """What the two older routes have in common.

    Args:
        scorer: words the log-probabilities of tokens; None: the request did not ask for any.
        n: choices of the answer.
    """

    prefix = ""
    chunk_object = ""
    whole_object = ""

    def __init__(
        self, model: str, *, include_usage: bool = False, scorer: Scorer | None = None, n: int = 1
    ) -> None:
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._scorer = scorer
        self._n = self._running = n
        self._closing: list[dict[str, Any]] = []
        """The last chunk of the last choice, which waits for the counts."""
        # All chunks of text are the same but for the text, so only that is encoded for each of them.
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @abc.abstractmethod
    def _choice(self, index: int, text: str | None, **more: Any) -> dict[str, Any]:
        """A choice in a chunk; ``text``: None where the chunk has none to tell of."""

    @abc.abstractmethod
    def _whole_choice(self, index: int, choice: ChoiceResult, **more: Any) -> dict[str, Any]:
        """A choice of an answer that does not stream."""

    def opening(self, usage: Usage) -> bytes:
        return b""

    def delta(self, choice: int, text: str) -> bytes:
        frame = self._frames.get(choice)
        if frame is None:
            chunk = self._chunk([self._choice(choice, _PLACEHOLDER)])
            before, _, behind = event(chunk).rpartition(dump(_PLACEHOLDER))
            frame = self._frames[choice] = before, behind
        return frame[0] + dump(text) + frame[1]

    def piece(self, piece: Piece) -> bytes:
        index, reason = piece.choice, piece.finish_reason
        events = self._said(piece)
        if reason is not None:
            self._running -= 1
            finish = self._chunk([self._choice(index, None, finish_reason=reason)])
            if self._running:
                return events + event(finish)
            self._closing = [finish]
        return events

    def _said(self, piece: Piece) -> bytes:
        """The events of what a piece says."""
        if piece.scores:
            choice = self._choice(piece.choice, piece.text, logprobs=self._score(piece.scores))
            return event(self._chunk([choice]))
        return self.delta(piece.choice, piece.text) if piece.text else b""

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        chunks = [*self._closing, {**self._chunk([]), "usage": usage_object(usage)}]
        if not self._include_usage:
            del chunks[-1]
        chunks[-1]["timings"] = timings_object(timings, usage)
        return b"".join(map(event, chunks)) + DONE_EVENT

    def failure(self, error: ApiError) -> bytes:
        return error_event(error) + DONE_EVENT

    def whole(self, choices: Sequence[ChoiceResult], usage: Usage, timings: Timings) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [
                self._whole_choice(
                    index,
                    choice,
                    logprobs=self._score(choice.scores),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(choices)
            ],
            "usage": usage_object(usage),
            "timings": timings_object(timings, usage),
        }

    def _score(self, scores: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return None if self._scorer is None else self._scorer(scores)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        # With include_usage every chunk has the member, null in all but the last.
        return {**chunk, "usage": None} if self._include_usage else chunk


class ChatShape(_Shape):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def _choice(self, index: int, text: str | None, **more: Any) -> dict[str, Any]:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def _whole_choice(self, index: int, choice: ChoiceResult, **more: Any) -> dict[str, Any]:
        answer = collect(choice.deltas)
        content = None if answer.calls and not choice.text else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        return {"index": index, "message": message, **more}

    def _said(self, piece: Piece) -> bytes:
        if not piece.deltas:
            return super()._said(piece)
        score = self._score(piece.scores) if piece.scores else None
        said = [words for delta in piece.deltas if (words := _delta_words(delta)) is not None]
        if score is not None and not said:
            said = [{"content": ""}]
        events = []
        for words in said:
            choice = self._choice(piece.choice, None, delta=words, logprobs=score)
            events.append(event(self._chunk([choice])))
            score = None
        return b"".join(events)

    def opening(self, usage: Usage) -> bytes:
        first = {"role": "assistant", "content": ""}
        chunks = (self._chunk([self._choice(index, None, delta=first)]) for index in range(self._n))
        return b"".join(map(event, chunks))


def _delta_words(delta: Delta) -> dict[str, Any] | None:
    """The ``delta`` member of a chat chunk; None: chunks have no word for it."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


class CompletionShape(_Shape):
    """``/v1/completions``.

    Attributes:
        echoes: for each choice, the prompt that its text begins with; empty where that is not wanted. To be
            set before the first token.
    """

    prefix = "cmpl-"
    chunk_object = "text_completion"
    whole_object = "text_completion"
    echoes: Sequence[str] = ()

    def _choice(self, index: int, text: str | None, **more: Any) -> dict[str, Any]:
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": None, **more}

    def _whole_choice(self, index: int, choice: ChoiceResult, **more: Any) -> dict[str, Any]:
        echo = self.echoes[index] if self.echoes else ""
        return self._choice(index, echo + choice.text, **more)

    def opening(self, usage: Usage) -> bytes:
        return b"".join(self.delta(index, echo) for index, echo in enumerate(self.echoes) if echo)

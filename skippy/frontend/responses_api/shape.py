"""The JSON of ``/v1/responses``: whole responses, and their events in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..choices import AnswerEnd, ChoiceResult, Piece
from ..errors import ApiError
from ..generation import Timings
from ..responses import Scorer, dump, timings_object
from ..running import Usage
from ..tools import CallArguments, CallBegin, CallBroken, CallEnd, Content, Delta, Reasoning
from .items import CallItem, MessageItem, OpenItem, ReasoningItem, new_id

Keep = Callable[[dict[str, Any], dict[str, Any]], object]


class ResponsesShape:
    """One response. Implements :class:`skippy.frontend.responses.ResponseShape`.

    Args:
        echo: members of the response that repeat the request.
        scorer: words the log-probabilities of tokens; None: the request did not ask for any.
        keep: takes the response once it is complete, and what it said as a message of chat.
    """

    def __init__(
        self, model: str, echo: dict[str, Any], *, scorer: Scorer | None = None, keep: Keep | None = None
    ) -> None:
        self._head = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            **echo,
        }
        self._scorer = scorer
        self._keep = keep
        self._number = 0
        self._count = 0
        """Items that were announced."""
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._item: OpenItem | None = None
        self._reason: AnswerEnd | None = None

    # -- the shape -------------------------------------------------------------------------------------

    def opening(self, usage: Usage) -> bytes:
        response = self._response("in_progress")
        return b"".join(
            self._event(kind, response=response) for kind in ("response.created", "response.in_progress")
        )

    def delta(self, choice: int, text: str) -> bytes:
        return self._say(text, [])

    def piece(self, piece: Piece) -> bytes:
        self._reason = piece.finish_reason or self._reason
        scores = self._scorer(piece.scores)["content"] if self._scorer and piece.scores else []
        events = self._say(piece.text, scores) if piece.text or scores else b""
        return events + b"".join(map(self._take, piece.deltas))

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        events = self._end()
        response = self._finished(usage, timings)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        failed = {**self._response("failed"), "error": {"code": _code(error), "message": error.message}}
        return self._event("error", code=error.code, message=error.message, param=error.param) + self._event(
            "response.failed", response=failed
        )

    def whole(self, choices: Sequence[ChoiceResult], usage: Usage, timings: Timings) -> dict[str, Any]:
        choice = choices[0]
        thoughts = tuple(delta for delta in choice.deltas if isinstance(delta, Reasoning))
        calls = tuple(delta for delta in choice.deltas if not isinstance(delta, Reasoning))
        self.piece(Piece(0, "", (), None, None, thoughts))
        self.piece(Piece(0, choice.text, tuple(choice.scores), choice.finish_reason, choice.stop, calls))
        self._end()
        return self._finished(usage, timings)

    # -- events ----------------------------------------------------------------------------------------

    def _event(self, kind: str, **members: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump(data))

    def _about(self, item: OpenItem, event: tuple[str, dict[str, Any]]) -> bytes:
        kind, members = event
        return self._event(kind, item_id=item.id, output_index=item.index, **members)

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        events, item = b"", self._item
        if not isinstance(item, MessageItem):
            item = MessageItem(self._count)
            events = self._open(item)
        return events + self._about(item, item.say(text, logprobs))

    def _take(self, delta: Delta) -> bytes:
        item = self._item
        match delta:
            case Content(text):
                return self._say(text, [])
            case Reasoning(text):
                events = b""
                if not isinstance(item, ReasoningItem):
                    item = ReasoningItem(self._count)
                    events = self._open(item)
                return events + self._about(item, item.say(text))
            case CallBegin(_, call_id, name):
                return self._open(CallItem(self._count, call_id, name))
            case CallArguments(_, text):
                assert isinstance(item, CallItem)
                return self._about(item, item.say(text))
            case CallEnd():
                return self._close("completed")
            case CallBroken():
                return self._close("incomplete", void=True)

    def _open(self, item: OpenItem) -> bytes:
        events = self._close("completed")
        self._item = item
        self._count += 1
        shown = item.item("in_progress", begun=False)
        added = self._event("response.output_item.added", output_index=item.index, item=shown)
        return events + added + b"".join(self._about(item, event) for event in item.opening())

    def _close(self, status: str, *, void: bool = False) -> bytes:
        """End the open item, if there is one. ``void``: it is no part of the response after all."""
        item, self._item = self._item, None
        if item is None:
            return b""
        done = item.item(status)
        if not void:
            self._output.append(done)
        events = b"".join(self._about(item, event) for event in item.closing())
        return events + self._event("response.output_item.done", output_index=item.index, item=done)

    def _end(self) -> bytes:
        # An answer without a word is a message without a word.
        events = self._open(MessageItem(self._count)) if self._item is None and not self._output else b""
        return events + self._close("incomplete" if self._reason == "length" else "completed")

    # -- responses -------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output),
            "usage": None,
        }

    def _finished(self, usage: Usage, timings: Timings) -> dict[str, Any]:
        cut = self._reason == "length"
        response = {
            **self._response("incomplete" if cut else "completed"),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage_object(usage),
            "timings": timings_object(timings, usage),
        }
        if self._keep is not None:
            self._keep(response, self._message())
        return response

    def _message(self) -> dict[str, Any]:
        """What was said, as a message of chat."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls = []
        for item in self._output:
            if item["type"] == "message":
                message["content"] += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                thought = message.get("reasoning_content", "") + item["content"][0]["text"]
                message["reasoning_content"] = thought
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls.append({"id": item["call_id"], "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        return message


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _code(error: ApiError) -> str:
    """The words for failed responses are fewer."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"

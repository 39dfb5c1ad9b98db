"""The JSON of ``/v1/responses``: whole responses, and their events in OpenAI's order."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ..choices import AnswerEnd, ChoiceResult, Piece
from ..errors import ApiError
from ..generation import Timings
from ..responses import Scorer, dump, timings_object
from ..running import Usage


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class _Item:
    """An item of the output while it is being said: a message of one text part."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = new_id("msg")
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def part(self) -> dict[str, Any]:
        text = "".join(self.text)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def item(self, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": status,
            "content": list(content),
        }


class ResponsesShape:
    """One response. Implements :class:`skippy.frontend.responses.ResponseShape`.

    Args:
        echo: members of the response that repeat the request.
        scorer: words the log-probabilities of tokens; None: the request did not ask for any.
        keep: takes the response once it is complete, the messages it said, and its size in bytes.
    """

    def __init__(
        self,
        model: str,
        echo: dict[str, Any],
        *,
        scorer: Scorer | None = None,
        keep: Callable[[dict[str, Any], list[dict[str, Any]], int], object] | None = None,
    ) -> None:
        self.id = new_id("resp")
        self._created = int(time.time())
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "model": model,
            "background": False,
            **echo,
        }
        self._scorer = scorer
        self._keep = keep
        self._number = 0
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._item: _Item | None = None
        self._reason: AnswerEnd | None = None

    # -- events ----------------------------------------------------------------------------------------

    def _event(self, kind: str, **members: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + dump(data) + b"\n\n"

    def opening(self, usage: Usage) -> bytes:
        response = self._response("in_progress")
        return b"".join(
            self._event(kind, response=response) for kind in ("response.created", "response.in_progress")
        )

    def delta(self, choice: int, text: str) -> bytes:
        events = b"" if self._item is not None else self._open()
        return events + self._say(text, [])

    def piece(self, piece: Piece) -> bytes:
        self._reason = piece.finish_reason or self._reason
        scores = self._scorer(piece.scores)["content"] if self._scorer and piece.scores else []
        if not piece.content and not scores:
            return b""
        events = b"" if self._item is not None else self._open()
        return events + self._say(piece.content, scores)

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        # An answer without a word is a message without a word.
        events = self._open() if self._item is None and not self._output else b""
        events += self._close()
        response = self._finished(usage, timings)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        failed = {**self._response("failed"), "error": {"code": _code(error), "message": error.message}}
        return self._event("error", code=error.code, message=error.message, param=error.param) + self._event(
            "response.failed", response=failed
        )

    def whole(self, choices: Sequence[ChoiceResult], usage: Usage, timings: Timings) -> dict[str, Any]:
        choice = choices[0]
        self.piece(Piece(0, choice.text, tuple(choice.scores), choice.finish_reason))
        self.closing(usage, timings)
        return self._finished_response

    # -- state -----------------------------------------------------------------------------------------

    def _open(self) -> bytes:
        item = self._item = _Item(len(self._output))
        added = self._event(
            "response.output_item.added", output_index=item.index, item=item.item("in_progress", [])
        )
        return added + self._about(item, "response.content_part.added", part=item.part)

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        item = self._item
        assert item is not None
        item.text.append(text)
        item.logprobs += logprobs
        return self._about(item, "response.output_text.delta", delta=text, logprobs=logprobs)

    def _close(self) -> bytes:
        item, self._item = self._item, None
        if item is None:
            return b""
        part = item.part
        done = item.item("incomplete" if self._reason == "length" else "completed", [part])
        self._output.append(done)
        return (
            self._about(item, "response.output_text.done", text=part["text"], logprobs=item.logprobs)
            + self._about(item, "response.content_part.done", part=part)
            + self._event("response.output_item.done", output_index=item.index, item=done)
        )

    def _about(self, item: _Item, kind: str, **members: Any) -> bytes:
        return self._event(kind, item_id=item.id, output_index=item.index, content_index=0, **members)

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
        self._finished_response = response
        text = "".join(part["text"] for item in self._output for part in item["content"])
        if self._keep is not None:
            self._keep(response, [{"role": "assistant", "content": text}], len(dump(response)))
        return response


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _code(error: ApiError) -> str:
    """The words for failed responses are fewer."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"

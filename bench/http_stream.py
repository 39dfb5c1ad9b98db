"""Reads one HTTP/1.1 response of an OpenAI endpoint as it comes: status, headers, events or a body.

Parsed by hand: a load generator that shares two cores with the server must cost next to nothing, and a
general HTTP library costs more per token than the token's way through the server.
"""

from __future__ import annotations

import json
import re
from typing import Any

HEAD_END = b"\r\n\r\n"
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class BadResponse(Exception):
    """What came is no HTTP response that this understands."""


class ResponseReader:
    """Fed with bytes as they arrive.

    Attributes:
        status: 0 before the head is there.
        headers: names in lower case.
        events: data of the server-sent events so far, in order.
        done: the response is complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[bytes] = []
        self.done = False
        self._raw = bytearray()
        self._body = bytearray()
        self._taken = 0  # of _body, by events
        self._left: int | None = None  # of a body with a length
        self._chunked = False

    @property
    def body(self) -> bytes:
        """The body as it came; what is left after the last event, for a stream."""
        return bytes(self._body[self._taken :])

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request."""
        return self.done and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> int:
        """Take what has arrived (``b""``: the connection has ended); returns how many events came with it.

        Raises BadResponse.
        """
        before = len(self.events)
        if not data:
            self._end()
            return len(self.events) - before
        self._raw += data
        if not self.status and not self._read_head():
            return 0
        self._read_body()
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            self._read_events()
        return len(self.events) - before

    def _end(self) -> None:
        if not self.status or self._chunked or self._left:
            raise BadResponse("the connection ended within the response")
        self.done = True

    def _read_head(self) -> bool:
        end = self._raw.find(HEAD_END)
        if end < 0:
            return False
        first, *lines = self._raw[:end].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not first.startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise BadResponse(f"no HTTP/1.1 status line: {first[:80]!r}")
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        del self._raw[: end + len(HEAD_END)]
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._left = int(length) if length is not None else None
        return True

    def _read_body(self) -> None:
        if self._chunked:
            self._read_chunks()
            return
        self._body += self._raw
        if self._left is not None:
            self._left -= len(self._raw)
            self.done = self._left <= 0
        self._raw.clear()

    def _read_chunks(self) -> None:
        start = 0
        raw = self._raw
        while not self.done and (line_end := raw.find(b"\r\n", start)) >= 0:
            try:
                size = int(raw[start:line_end].split(b";")[0], 16)
            except ValueError:
                raise BadResponse(f"no chunk size: {bytes(raw[start : start + 20])!r}") from None
            data, after = line_end + 2, line_end + 2 + size + 2
            if len(raw) < after:
                break
            self._body += raw[data : data + size]
            start, self.done = after, size == 0
        del raw[:start]

    def _read_events(self) -> None:
        while end := _EVENT_END.search(self._body, self._taken):
            block = bytes(self._body[self._taken : end.start()])
            self._taken = end.end()
            # Comments, which keep a connection alive, are no events.
            if block.startswith(b"data: "):
                self.events.append(block[6:])


def request_head(host: str, port: int, path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def piece_of(event: Any) -> str:
    """The text that a chunk of a completion or a chat brings; empty for a chunk that brings none."""
    choice = (event.get("choices") or [{}])[0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def load_event(data: bytes) -> Any:
    """A chunk as JSON. Raises BadResponse."""
    try:
        return json.loads(data)
    except ValueError:
        raise BadResponse(f"an event is no JSON: {data[:80]!r}") from None

"""Clients that do what clients do: read to the end, leave, break the connection, stall, ask for nonsense."""

from __future__ import annotations

import contextlib
import enum
import json
import random
import socket
import struct
from typing import Any, Final

import attrs
import trio

from .http_stream import BadResponse, ResponseReader, load_event, request_head

REQUEST_SECS: Final = 90.0
"""Longest that any request may take, one that is replayed or waits for a stage included."""
FILL_WORDS: Final = 120
"""More tokens than any other client's prompt and answer together."""
_RESET: Final = struct.pack("ii", 1, 0)
_READ_BYTES: Final = 65536


class Habit(enum.Enum):
    """What a client does with its answer."""

    READ = "reads to the end"
    LEAVE = "leaves after a few tokens"
    LEAVE_EARLY = "leaves before the first token"
    RESET = "resets the connection"
    HALF_CLOSE = "ends its side of the connection, and reads to the end"
    STALL = "reads nothing for a while, then leaves"
    CUT_REQUEST = "leaves within its request"
    NONSENSE = "asks for what there is not"
    FILL = "reads to the end, and asks for what is worth remembering"


WEIGHTS: Final = {
    Habit.READ: 2,
    Habit.LEAVE: 5,
    Habit.LEAVE_EARLY: 4,
    Habit.RESET: 4,
    Habit.HALF_CLOSE: 1,
    Habit.STALL: 1,
    Habit.CUT_REQUEST: 1,
    Habit.NONSENSE: 1,
}


@attrs.frozen(slots=True)
class Outcome:
    """How a request ended.

    Attributes:
        result: ``answer``, ``left``, ``refused`` (an error instead of an answer), ``error`` (one in the
            stream) or ``broken``: an end that no server may give, unless its process was killed.
        detail: of a refusal, an error or a break.
    """

    habit: Habit
    result: str
    detail: str = ""

    @property
    def cancelled_or_broken(self) -> bool:
        """Whether the chain had to give up a request."""
        return self.result in ("left", "error", "broken") or (
            self.result == "refused" and self.habit is not Habit.NONSENSE
        )


@attrs.frozen(slots=True)
class Target:
    """The endpoint."""

    host: str
    port: int
    model: str


def draw_habit(chance: random.Random) -> Habit:
    return chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]


async def one_request(target: Target, habit: Habit, chance: random.Random) -> Outcome:
    """Send one request and treat its answer as the habit says."""
    with trio.move_on_after(REQUEST_SECS):
        try:
            sock = trio.socket.socket()
            await sock.connect((target.host, target.port))
        except OSError as exc:
            return Outcome(habit, "broken", f"connecting: {exc}")
        async with trio.SocketStream(sock) as stream:
            try:
                return await _use(stream, target, habit, chance)
            except (trio.BrokenResourceError, BadResponse, OSError) as exc:
                return Outcome(habit, "broken", f"{type(exc).__name__}: {exc}")
    return Outcome(habit, "broken", f"no end within {REQUEST_SECS:g} s")


def _body(target: Target, habit: Habit, chance: random.Random) -> dict[str, Any]:
    words = FILL_WORDS if habit is Habit.FILL else chance.choice([2, 10, 40])
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": " ".join(chance.choice(["sea", "sky", "one", "two", "red"]) for _ in range(words)),
        "max_tokens": chance.choice([2, 6, 12]),
        "temperature": chance.choice([0, 0.8]),
        "ignore_eos": True,
        "stream": True,
    }
    if habit is Habit.NONSENSE:
        body |= chance.choice([{"model": "none"}, {"max_tokens": 0}, {"prompt": "word " * 5000}])
    elif habit not in (Habit.READ, Habit.FILL):
        body["max_tokens"] = 40  # so that there is something to leave
    return body


async def _use(stream: trio.SocketStream, target: Target, habit: Habit, chance: random.Random) -> Outcome:
    data = json.dumps(_body(target, habit, chance)).encode()
    head = request_head(target.host, target.port, "/v1/completions", len(data))
    whole = head + data
    if habit is Habit.CUT_REQUEST:
        await stream.send_all(whole[: chance.randrange(1, len(whole))])
        return Outcome(habit, "left")
    await stream.send_all(whole)
    if habit is Habit.LEAVE_EARLY:
        await trio.sleep(chance.uniform(0, 0.2))
        return Outcome(habit, "left")
    if habit is Habit.HALF_CLOSE:
        await stream.send_eof()
    if habit is Habit.STALL:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await trio.sleep(chance.uniform(0.2, 1))
        return Outcome(habit, "left")
    wanted = chance.randrange(1, 6) if habit in (Habit.LEAVE, Habit.RESET) else None
    return await _read(stream, habit, wanted)


async def _read(stream: trio.SocketStream, habit: Habit, wanted: int | None) -> Outcome:
    """Read the answer, or as many events as are wanted of it."""
    reader = ResponseReader()
    while not reader.done:
        data = await stream.receive_some(_READ_BYTES)
        reader.feed(data)
        if wanted is not None and len(reader.events) >= wanted:
            if habit is Habit.RESET:
                with contextlib.suppress(OSError):
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            return Outcome(habit, "left")
    if reader.status != 200:
        text = f"{reader.status}: {reader.body.decode(errors='replace')[:200]}"
        typed = b'"error"' in reader.body
        return Outcome(habit, "refused" if typed else "broken", text)
    events = reader.events
    if not events or events[-1] != b"[DONE]":
        return Outcome(habit, "broken", "the stream ended without [DONE]")
    errors = [event["error"] for event in map(load_event, events[:-1]) if "error" in event]
    return Outcome(habit, "error", str(errors[0])[:200]) if errors else Outcome(habit, "answer")

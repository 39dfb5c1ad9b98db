"""Pieces of streams that go past the ASGI server: framing, order, and clients that read slowly."""

from __future__ import annotations

import json
import socket
from typing import Any

import attrs
import h11
import httpx
import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.direct import EXTENSION, DirectBody, OfferingApp
from skippy.frontend.options import FrontendOptions
from skippy.frontend.responses import ChatShape, CompletionShape

from .support import ScriptedGenerator, completion_body, say, serving


@attrs.define
class Wire:
    """A connection that takes ``room`` bytes at once."""

    chunked: bool = True
    room: int = 1_000_000
    asked: int = 0
    sent: bytes = b""

    def frame(self, piece: bytes) -> bytes:
        self.asked += 1
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked and piece else piece

    def send_now(self, data: bytes) -> int:
        taken = data[: self.room]
        self.sent += taken
        self.room -= len(taken)
        return len(taken)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += data


async def test_the_framing_is_asked_for_once_where_it_is_chunked() -> None:
    wire = Wire()
    body = DirectBody(wire)
    assert body.send_now(b"ab")
    assert body.send_now(b"0123456789abcdef")
    assert (wire.sent, wire.asked) == (b"2\r\nab\r\n10\r\n0123456789abcdef\r\n", 1)
    assert body.send_now(b"")  # which must not become the chunk that ends the body
    await body.flush()
    assert wire.sent == b"2\r\nab\r\n10\r\n0123456789abcdef\r\n"


async def test_a_body_without_chunks_stays_without() -> None:
    wire = Wire(chunked=False)
    body = DirectBody(wire)
    assert body.send_now(b"ab")
    assert body.send_now(b"cd")
    assert (wire.sent, wire.asked) == (b"abcd", 2)


@pytest.mark.parametrize("room", range(9))
async def test_what_does_not_leave_at_once_waits_for_the_flush(room: int) -> None:
    wire = Wire(room=room)
    body = DirectBody(wire)
    assert body.send_now(b"abc") == (room == 8)
    assert wire.sent == b"3\r\nabc\r\n"[:room]
    await body.flush()
    await body.flush()
    assert wire.sent == b"3\r\nabc\r\n"


async def test_only_requests_get_an_offer() -> None:
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, *arguments: Any) -> None:
        seen.append(scope)

    offering: Any = OfferingApp(app, Wire())
    for kind in ("http", "http", "lifespan"):
        await offering({"type": kind, "extensions": {}}, None, None, None, None)
    first, second, other = (scope["extensions"] for scope in seen)
    assert isinstance(first[EXTENSION]["body"], DirectBody)
    assert first[EXTENSION]["body"] is not second[EXTENSION]["body"]
    assert other == {}


@given(st.text(), st.text(min_size=1), st.booleans())
def test_an_event_of_text_is_the_chunk_with_that_text(text: str, model: str, include_usage: bool) -> None:
    def chunk(event: bytes) -> Any:
        assert event.startswith(b"data: ")
        assert event.endswith(b"}\n\n")
        assert b"\n" not in event[:-2]
        return json.loads(event[6:])

    text = text.encode("utf-8", "replace").decode()
    model = model.encode("utf-8", "replace").decode()
    usage = {"usage": None} if include_usage else {}
    chat = chunk(ChatShape(model, include_usage=include_usage).delta(0, text))
    assert chat == {
        "id": chat["id"], "created": chat["created"], "model": model, "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    } | usage  # fmt: skip
    plain = chunk(CompletionShape(model, include_usage=include_usage).delta(0, text))
    assert plain == {
        "id": plain["id"], "created": plain["created"], "model": model, "object": "text_completion",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}],
    } | usage  # fmt: skip


async def connect(url: str, *, receive_buffer: int | None = None) -> trio.SocketStream:
    at = httpx.URL(url)
    client = trio.socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await client.connect((at.host, at.port or 0))
    return trio.SocketStream(client)


def post(version: str = "1.1") -> bytes:
    body = json.dumps(completion_body([1], stream=True)).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def text_of(body: bytes) -> str:
    frames = [line[6:] for line in body.decode().split("\n\n") if line]
    assert frames.pop() == "[DONE]"
    return "".join(json.loads(frame)["choices"][0]["text"] for frame in frames)


class Client:
    """An HTTP/1.1 client that reads one response piece by piece."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._connection = h11.Connection(h11.CLIENT)

    async def ask(self) -> None:
        if self._connection.our_state is not h11.IDLE:
            self._connection.start_next_cycle()
        await self._stream.send_all(post())
        self._connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
        self._connection.send(h11.EndOfMessage())

    async def piece(self) -> bytes | None:
        """The next bytes of the body; None at its end."""
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                self._connection.receive_data(bytes(await self._stream.receive_some(1 << 20)))
            elif isinstance(event, h11.Data):
                return bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return None


async def test_each_token_is_a_chunk_as_soon_as_it_is_there() -> None:
    steps: list[trio.Event] = []
    texts = ["a", "b", "c", "d"]

    def script(_: object) -> list[int | trio.Event]:
        steps[:] = [trio.Event() for _ in texts] + [trio.Event()]
        return [step for pair in zip(steps, map(ord, texts), strict=False) for step in pair] + steps[-1:]

    generator = ScriptedGenerator(script)
    async with serving(generator) as url, await connect(url) as stream:
        client = Client(stream)
        for number in (1, 2):  # the connection is as good as new after a stream
            await client.ask()
            while len(generator.requests) < number:
                await trio.lowlevel.checkpoint()
            for step, text in zip(steps, texts, strict=False):
                step.set()
                piece = await client.piece()
                assert piece is not None
                assert json.loads(piece[6:])["choices"][0]["text"] == text
            steps[-1].set()
            end = await client.piece()
            assert end is not None
            assert end.endswith(b"data: [DONE]\n\n")
            assert await client.piece() is None


async def test_http_1_0_gets_a_body_without_chunks() -> None:
    async with serving(ScriptedGenerator(say("hello"))) as url, await connect(url) as client:
        await client.send_all(post("1.0"))
        received = b"".join([bytes(data) async for data in client])
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert text_of(body) == "hello"


class LongPieces(ToyVocabulary):
    def piece(self, token: int, *, special: bool = False) -> bytes:
        return super().piece(token, special=special) * 20_011


async def test_a_client_that_pauses_gets_every_byte_in_order() -> None:
    # 8 MB are more than the system keeps for a client that does not read.
    tokens = [97 + i % 26 for i in range(400)]
    steps = [trio.Event() for _ in tokens]
    script = [step for pair in zip(steps, tokens, strict=True) for step in pair]
    generator = ScriptedGenerator(lambda _: script, vocabulary=LongPieces())
    async with (
        serving(generator, FrontendOptions(stall_timeout_secs=600), stall_timeout_secs=600) as url,
        await connect(url, receive_buffer=4096) as stream,
    ):
        client = Client(stream)
        await client.ask()
        while not generator.active:
            await trio.lowlevel.checkpoint()
        for step in steps:  # the response waits for each of the first tokens, until it is stuck
            await trio.testing.wait_all_tasks_blocked()
            step.set()
        await trio.testing.wait_all_tasks_blocked()
        assert generator.active == 1
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        body = bytearray()
        while (piece := await client.piece()) is not None:
            body += piece
    assert text_of(bytes(body)) == "".join(chr(token) * 20_011 for token in tokens)

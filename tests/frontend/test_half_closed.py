"""Clients that send no more, but read on; and how those are told apart that are gone."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import attrs
import h11
import httpx
import pytest
import trio

from skippy.frontend import clients
from skippy.frontend.options import FrontendOptions

from .support import MODEL, ScriptedGenerator, Step, chat_body, completion_body, reset, say, serving

COMMENT = b": keep-alive\n\n"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send no more are asked often whether they are there."""
    monkeypatch.setattr(clients, "PROBE_SECS", 0.001)


def get(path: str, *more: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "host: localhost", *more, "", ""]).encode()


def post(path: str, body: Any, *more: str, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: localhost", f"content-length: {len(data)}", *more, "", ""]
    return "\r\n".join(lines).encode() + data


async def connect(url: str) -> trio.SocketStream:
    at = httpx.URL(url)
    return await trio.open_tcp_stream(at.host, at.port or 0)


@attrs.frozen
class Answer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        """Of a completion, streamed or not. A stream must have its end."""
        if not self.body.startswith((b"data: ", COMMENT)):
            choice = json.loads(self.body)["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        frames = [part for part in self.body.replace(COMMENT, b"").decode().split("\n\n") if part]
        assert frames.pop() == "data: [DONE]"
        choices = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames]
        assert choices[-1]["finish_reason"] is not None
        return "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)


class Reader:
    """Reads whole answers, by h11's judgement."""

    def __init__(self, stream: trio.SocketStream, received: bytes = b"") -> None:
        self._stream = stream
        self._connection = h11.Connection(h11.CLIENT)
        if received:
            self._connection.receive_data(received)

    async def _receive(self) -> None:
        self._connection.receive_data(bytes(await self._stream.receive_some()))

    async def beginning(self) -> None:
        """Wait for the first byte of the next answer."""
        while not self._connection.trailing_data[0]:
            await self._receive()

    async def answer(self) -> Answer:
        if self._connection.our_state is h11.DONE:
            self._connection.start_next_cycle()
        self._connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        self._connection.send(h11.EndOfMessage())
        status, body = 0, bytearray()
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                await self._receive()
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return Answer(status, bytes(body))

    async def end(self) -> None:
        """Wait for the end of the connection; there must be no more data."""
        assert self._connection.trailing_data[0] == b""
        assert await self._stream.receive_some() == b""


async def read_answers(stream: trio.SocketStream, count: int, *, received: bytes = b"") -> list[Answer]:
    reader = Reader(stream, received)
    answers = [await reader.answer() for _ in range(count)]
    await reader.end()
    return answers


@pytest.mark.parametrize("asked_twice", [False, True])
@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (get("/health"), 200, b'{"status":"ok"}'),
        (get("/healthz"), 200, b'{"status":"ok"}'),
        (get("/healthz", "connection: close"), 200, b'{"status":"ok"}'),
        (get("/healthz", version="1.0"), 200, b'{"status":"ok"}'),
        (get("/readyz"), 200, b"ready"),
        (get("/v1/models"), 200, MODEL.encode()),
        (get(f"/v1/models/{MODEL}"), 200, MODEL.encode()),
        (get("/v1/models/other"), 404, b"model_not_found"),
        (get("/nothing"), 404, b"there is nothing at GET /nothing"),
        (get(CHAT), 405, b"takes"),
        (get("/health", "upgrade: h2c", "connection: upgrade"), 200, b'{"status":"ok"}'),
        (post(CHAT, []), 400, b"invalid_request_error"),
        (post(COMPLETIONS, completion_body(max_tokens=0)), 400, b"max_tokens"),
        (post(COMPLETIONS, {}, "content-type: text/plain"), 415, b"application/json"),
        (post(COMPLETIONS, completion_body()), 200, b'"text":"hello"'),
        (post(COMPLETIONS, completion_body(), version="1.0"), 200, b'"text":"hello"'),
        (post(COMPLETIONS, completion_body(stream=True)), 200, b"data: [DONE]\n\n"),
        (post(COMPLETIONS, completion_body(stream=True), version="1.0"), 200, b"data: [DONE]\n\n"),
        (post(CHAT, chat_body()), 200, b'"content":"hello"'),
        (post(CHAT, chat_body(stream=True), "connection: close"), 200, b"data: [DONE]\n\n"),
    ],
)
async def test_every_route_answers_in_whole(
    request_bytes: bytes, status: int, words: bytes, asked_twice: bool
) -> None:
    """Whether the end comes with the request or on a connection that has served one."""
    async with serving(ScriptedGenerator(say("hello"))) as url, await connect(url) as client:
        if asked_twice:
            await client.send_all(get("/health"))
            before = b""
            while not before.endswith(b'{"status":"ok"}'):
                before += await client.receive_some()
        await client.send_all(request_bytes)
        await client.send_eof()
        [answer] = await read_answers(client, 1)
    assert answer.status == status
    assert words in answer.body
    if words.startswith(b"data:"):
        assert answer.text == "hello"


async def test_all_pipelined_requests_are_answered() -> None:
    requests = [
        post(COMPLETIONS, completion_body()),
        get("/health"),
        post(CHAT, chat_body(stream=True)),
        get("/nothing"),
        post(COMPLETIONS, completion_body(stream=True)),
    ]
    generator = ScriptedGenerator(lambda request: list(b"hello" * 50))
    async with serving(generator) as url, await connect(url) as client:
        await client.send_all(b"".join(requests))
        await client.send_eof()
        first, health, second, nothing, third = await read_answers(client, 5)
    assert first.text == second.text == third.text == "hello" * 50
    assert json.loads(health.body) == {"status": "ok"}
    assert nothing.status == 404
    assert len(generator.requests) == 3


@pytest.mark.parametrize("half_close", [False, True])
@pytest.mark.parametrize("behind", [b"\n", b"\r\n\r\n", get("/nothing"), post(COMPLETIONS, {}) * 3])
@pytest.mark.parametrize(
    "last",
    [
        get("/health", version="1.0"),
        get("/health", "connection: close"),
        post(COMPLETIONS, completion_body(), version="1.0"),
        post(COMPLETIONS, completion_body(stream=True), "connection: close"),
    ],
)
async def test_what_follows_the_last_request_is_ignored(last: bytes, behind: bytes, half_close: bool) -> None:
    generator = ScriptedGenerator(say("hello"))
    async with serving(generator) as url, await connect(url) as client:
        await client.send_all(last + behind)
        if half_close:
            await client.send_eof()
        [answer] = await read_answers(client, 1)
    assert answer.status == 200
    if last.startswith(b"POST"):
        assert answer.text == "hello"


@pytest.mark.parametrize("cut", [1, 20, 80])
async def test_a_request_that_is_cut_off_is_refused(cut: int) -> None:
    generator = ScriptedGenerator(say("hello"))
    async with serving(generator) as url, await connect(url) as client:
        await client.send_all(get("/health") + post(COMPLETIONS, completion_body())[:-cut])
        await client.send_eof()
        health, refused = await read_answers(client, 2)
    assert health.status == 200
    assert refused.status == 400
    assert "not valid HTTP/1.1" in json.loads(refused.body)["error"]["message"]
    assert generator.requests == []


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_answer_that_takes_long(soon: None, version: str) -> None:
    """Its beginning is sent ahead, for it is always the same."""
    go = trio.Event()
    generator = ScriptedGenerator(lambda _: [go, *b"hello"])
    async with serving(generator) as url, await connect(url) as client:
        await client.send_all(post(COMPLETIONS, completion_body(), version=version))
        await client.send_eof()
        received = b""
        while len(received) < len(b"HTTP/1.1 "):
            received += await client.receive_some()
        assert received == b"HTTP/1.1 "
        go.set()
        [answer] = await read_answers(client, 1, received=received)
    assert answer.status == 200
    assert answer.text == "hello"


async def test_a_refusal_that_takes_long(soon: None) -> None:
    """The beginning that was sent ahead fits every status."""
    go = trio.Event()
    generator = ScriptedGenerator(lambda _: [go, RuntimeError("broken")])
    async with serving(generator) as url, await connect(url) as client:
        await client.send_all(post(COMPLETIONS, completion_body(stream=True)))
        await client.send_eof()
        received = bytes(await client.receive_some())
        assert b"HTTP/1.1 ".startswith(received)
        go.set()
        [answer] = await read_answers(client, 1, received=received)
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["type"] == "server_error"


async def test_pipelined_answers_that_take_long(soon: None) -> None:
    steps: list[trio.Event] = []

    def script(_: object) -> list[Step]:
        steps.append(trio.Event())
        return [steps[-1], *b"hello"]

    async with serving(ScriptedGenerator(script)) as url, await connect(url) as client:
        await client.send_all(post(COMPLETIONS, completion_body()) * 3)
        await client.send_eof()
        reader = Reader(client)
        for number in range(1, 4):
            await reader.beginning()
            while len(steps) < number:
                await trio.lowlevel.checkpoint()
            steps[-1].set()
            assert (await reader.answer()).text == "hello"
        await reader.end()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("keep_alive", [0.001, 600])
async def test_a_stream_that_waits_has_comments(soon: None, keep_alive: float, version: str) -> None:
    """Before its first token, if it has begun, and after it; and then it goes on to its end."""
    first, second = trio.Event(), trio.Event()
    generator = ScriptedGenerator(lambda _: [first, *b"he", second, *b"llo"])
    async with (
        serving(generator, FrontendOptions(keep_alive_secs=keep_alive)) as url,
        await connect(url) as client,
    ):
        await client.send_all(post(CHAT, chat_body(stream=True), version=version))
        await client.send_eof()
        received = b""
        if keep_alive < 1:
            while received.count(COMMENT) < 3:
                received += await client.receive_some()
        first.set()
        while b'"content":"e"' not in received:
            received += await client.receive_some()
        comments = received.count(COMMENT)
        while received.count(COMMENT) < comments + 2:
            received += await client.receive_some()
        second.set()
        [answer] = await read_answers(client, 1, received=received)
    assert answer.text == "hello"


async def test_the_end_may_come_in_the_middle_of_a_stream() -> None:
    ends = [trio.Event() for _ in range(20)]
    text = b"abcdefghijklmnopqrst"
    script = [step for pair in zip(ends, text, strict=True) for step in pair]
    async with serving(ScriptedGenerator(lambda _: script)) as url, await connect(url) as client:
        await client.send_all(post(COMPLETIONS, completion_body(stream=True)))
        received = b""
        for number, end in enumerate(ends):
            end.set()
            while received.count(b'"text":') <= number:
                received += await client.receive_some()
            if number == 9:
                await client.send_eof()
        [answer] = await read_answers(client, 1, received=received)
    assert answer.text == text.decode()


def close(client: trio.SocketStream) -> None:
    client.socket.close()


def half_close_first(client: trio.SocketStream) -> None:
    client.socket.shutdown(socket.SHUT_WR)
    client.socket.close()


@pytest.mark.parametrize("leave", [close, half_close_first, reset])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("stream", "begun"), [(False, b""), (True, b""), (True, COMMENT), (True, b'"text":"a"')]
)
async def test_who_is_gone_is_noticed(
    soon: None,
    stream: bool,
    begun: bytes,
    times: int,
    version: str,
    leave: Callable[[trio.SocketStream], None],
) -> None:
    """Though nothing comes that could be sent: its generation ends, and nobody sees those behind it."""
    never = trio.Event()
    generator = ScriptedGenerator(lambda _: [97, never] if b"text" in begun else [never])
    options = FrontendOptions(keep_alive_secs=0.001 if begun == COMMENT else 600)
    async with serving(generator, options, stall_timeout_secs=600) as url:
        client = await connect(url)
        await client.send_all(post(COMPLETIONS, completion_body(stream=stream), version=version) * times)
        received = b""
        while not generator.active or begun not in received:
            if begun:
                received += await client.receive_some()
            else:
                await trio.lowlevel.checkpoint()
        leave(client)
        await generator.idle.wait()
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.get("/health")).status_code == 200
    assert len(generator.requests) == 1


async def test_who_sends_no_more_and_then_leaves_is_noticed(soon: None) -> None:
    generator = ScriptedGenerator(lambda _: [trio.Event()])
    async with serving(generator) as url:
        client = await connect(url)
        await client.send_all(post(COMPLETIONS, completion_body()))
        await client.send_eof()
        while not generator.active:
            await trio.lowlevel.checkpoint()
        assert b"HTTP/1.1 ".startswith(await client.receive_some())
        await client.aclose()
        await generator.idle.wait()


async def test_who_is_gone_is_noticed_by_the_tokens() -> None:
    """Without being asked: the second write fails."""
    generator = ScriptedGenerator(lambda _: [97] * 100_000, context_length=200_000)
    async with serving(generator) as url:
        client = await connect(url)
        await client.send_all(post(COMPLETIONS, completion_body(stream=True)))
        await client.receive_some()
        await client.send_eof()
        await client.aclose()
        await generator.idle.wait()

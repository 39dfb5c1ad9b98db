"""Listening, shutting down, and clients that do not read."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
import trio
import trio.testing

from skippy.frontend.app import create_app
from skippy.frontend.options import FrontendOptions
from skippy.frontend.server import parse_bind, serve_http

from .support import ScriptedGenerator, chat_body, client, say, serving


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]:9337", "::1", 9337),
        (":0", "", 0),
        ("name:65535", "name", 65535),
    ],
)
def test_parse_bind(text: str, host: str, port: int) -> None:
    assert parse_bind(text) == (host, port)


@pytest.mark.parametrize("text", ["", "9337", "host:", "host:x", "host:65536", "::1:80", "host:-1"])
def test_parse_bind_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_bind(text)


async def test_port_in_use_names_the_endpoint() -> None:
    app = create_app(ScriptedGenerator(say("x")))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=bind) as caught:
            await serve_http(app, bind)
    assert caught.value.errno is not None


async def test_serves_an_inherited_descriptor() -> None:
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    app = create_app(ScriptedGenerator(say("x")))
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
                await serve_http(app, f"fd://{bound.detach()}", task_status=task_status)

            assert await nursery.start(serve) == ("127.0.0.1", port)
            async with httpx.AsyncClient(timeout=60) as http:
                assert (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200
            nursery.cancel_scope.cancel()


async def test_shutdown_lets_a_short_request_finish() -> None:
    go = trio.Event()
    generator = ScriptedGenerator(lambda request: [97, go, 98])
    shutdown = trio.Event()
    app = create_app(generator)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, httpx.AsyncClient(timeout=60) as http:

            async def serve(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
                await serve_http(
                    app, "127.0.0.1:0", shutdown=shutdown, grace_secs=15, task_status=task_status
                )

            host, port = await nursery.start(serve)
            url = f"http://{host}:{port}/v1/chat/completions"
            async with http.stream("POST", url, json=chat_body(stream=True)) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                shutdown.set()
                go.set()
                rest = [line async for line in lines]
    assert '"content":"b"' in "".join(rest)
    assert rest[-2] == "data: [DONE]"


async def test_while_requests_finish_new_ones_get_503() -> None:
    """On connections that were open before, and on new ones: nobody waits in vain."""
    go = trio.Event()
    generator = ScriptedGenerator(lambda request: [97, go, 98])
    shutdown = trio.Event()
    app = create_app(generator)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, httpx.AsyncClient(timeout=60) as http:

            async def serve(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
                await serve_http(
                    app, "127.0.0.1:0", shutdown=shutdown, grace_secs=15, task_status=task_status
                )

            host, port = await nursery.start(serve)
            url = f"http://{host}:{port}"
            assert (await http.get(f"{url}/readyz")).status_code == 200
            async with http.stream(
                "POST", f"{url}/v1/chat/completions", json=chat_body(stream=True)
            ) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                shutdown.set()
                await trio.testing.wait_all_tasks_blocked()
                async with httpx.AsyncClient(timeout=60) as late:
                    for client in (http, late):
                        refused = await client.post(f"{url}/v1/chat/completions", json=chat_body())
                        assert refused.status_code == 503
                        assert "shutting down" in refused.json()["error"]["message"]
                        assert (await client.get(f"{url}/readyz")).status_code == 503
                        assert (await client.get(f"{url}/health")).status_code == 200
                go.set()
                rest = [line async for line in lines]
    assert '"content":"b"' in "".join(rest)
    assert rest[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_shutdown_closes_idle_connections_at_once(stream: bool) -> None:
    async with (
        httpx.AsyncClient(timeout=60) as http,
        serving(ScriptedGenerator(say("x")), grace_secs=600) as url,
    ):
        answer = await http.post(f"{url}/v1/chat/completions", json=chat_body(stream=stream))
        assert answer.status_code == 200


async def test_pipelined_requests() -> None:
    generator = ScriptedGenerator(say("x"))
    body = json.dumps(chat_body()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    async with serving(generator) as url:
        target = httpx.URL(url)
        connection = await trio.open_tcp_stream(target.host, target.port or 0)
        await connection.send_all((head.encode() + body) * 3)
        await connection.send_eof()
        received = await read_to_end(connection)
    assert 1 <= received.count(b"HTTP/1.1 200 ") <= 3
    assert generator.active == 0


async def open_stream(url: str) -> tuple[trio.SocketStream, bytes]:
    """A client that asks for a stream and has read its beginning."""
    target = httpx.URL(url)
    body = json.dumps(chat_body(stream=True)).encode()
    connection = await trio.open_tcp_stream(target.host, target.port or 0)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    await connection.send_all(head.encode() + body)
    return connection, bytes(await connection.receive_some())


async def read_to_end(connection: trio.SocketStream) -> bytes:
    received = bytearray()
    with trio.fail_after(20):
        async with connection:
            async for data in connection:
                received += data
    return bytes(received)


async def test_shutdown_ends_a_long_stream_with_an_error_frame() -> None:
    never = trio.Event()
    generator = ScriptedGenerator(lambda request: [97, never])
    async with serving(generator, grace_secs=0.01) as url:
        connection, received = await open_stream(url)
    received += await read_to_end(connection)
    assert b"shutting down" in received
    assert b"data: [DONE]" in received
    assert generator.active == 0


async def test_cancellation_ends_a_long_stream_with_an_error_frame() -> None:
    never = trio.Event()
    generator = ScriptedGenerator(lambda request: [97, never])
    app = create_app(generator)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
                await serve_http(app, "127.0.0.1:0", grace_secs=600, task_status=task_status)

            host, port = await nursery.start(serve)
            connection, received = await open_stream(f"http://{host}:{port}")
            nursery.cancel_scope.cancel()
    received += await read_to_end(connection)
    assert b"shutting down" in received
    assert b"data: [DONE]" in received


async def stalled_reader(url: httpx.URL) -> trio.SocketStream:
    """A client that asks for a stream and never reads a byte."""
    reader = trio.socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await reader.connect((url.host, url.port or 0))
    body = json.dumps(chat_body(stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    stream = trio.SocketStream(reader)
    await stream.send_all(head.encode() + body)
    return stream


def endless() -> ScriptedGenerator:
    # 200 MB of frames is more than any socket buffer.
    return ScriptedGenerator(lambda request: [97] * 1_000_000, context_length=2_000_000)


async def test_stalled_reader_loses_its_connection() -> None:
    generator = endless()
    async with client(generator, stall_timeout_secs=0.2) as http:
        async with await stalled_reader(http.base_url):
            while not generator.active:
                await trio.lowlevel.checkpoint()
            await generator.idle.wait()
        generator.script = say("next")
        assert (await http.post("/v1/chat/completions", json=chat_body())).status_code == 200


async def test_stalled_reader_loses_its_generation() -> None:
    generator = endless()
    # The server waits long, the generation does not.
    async with (
        client(generator, FrontendOptions(stall_timeout_secs=0.2), stall_timeout_secs=600) as http,
        await stalled_reader(http.base_url),
    ):
        while not generator.active:
            await trio.lowlevel.checkpoint()
        await generator.idle.wait()
        assert (await http.get("/health")).status_code == 200


async def test_shutdown_does_not_wait_for_a_stalled_reader() -> None:
    generator = endless()
    async with serving(generator, grace_secs=0.01, stall_timeout_secs=600) as url:
        reader = await stalled_reader(httpx.URL(url))
        while not generator.active:
            await trio.lowlevel.checkpoint()
    await reader.aclose()
    assert generator.active == 0


async def test_cancelled_server_does_not_wait_for_a_stalled_reader() -> None:
    generator = endless()
    app = create_app(generator, FrontendOptions(stall_timeout_secs=0.1))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
                await serve_http(app, "127.0.0.1:0", stall_timeout_secs=600, task_status=task_status)

            host, port = await nursery.start(serve)
            async with await stalled_reader(httpx.URL(f"http://{host}:{port}")):
                while not generator.active:
                    await trio.lowlevel.checkpoint()
                await generator.idle.wait()
                nursery.cancel_scope.cancel()
    assert generator.active == 0

"""Clients that leave in every way: nothing of theirs stays behind."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from skippy.frontend import clients
from skippy.frontend.app import create_app
from skippy.frontend.clients import ClientConnections

from .support import ScriptedGenerator, completion_body, reset, say, serving


@asynccontextmanager
async def listening(
    generator: ScriptedGenerator,
) -> AsyncIterator[tuple[trio.SocketListener, ClientConnections]]:
    config = Config()
    config.accesslog = config.errorlog = None
    config.keep_alive_timeout = 600
    connections = ClientConnections(create_app(generator), config, WorkerContext(None), 600)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, connections.handle, [listener])
            yield listener, connections
            nursery.cancel_scope.cancel()


def post(**fields: object) -> bytes:
    body = json.dumps(completion_body([1], **fields)).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


async def test_an_idle_client_that_leaves() -> None:
    async with listening(ScriptedGenerator(say("x"))) as (listener, connections):
        client = await trio.testing.open_stream_to_socket_listener(listener)
        await client.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in bytes(await client.receive_some())
        assert connections.count == 1
        await client.aclose()
        await connections.wait_empty()


async def test_more_clients_than_can_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENTS", 2)
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    never = trio.Event()
    async with listening(ScriptedGenerator(lambda _: [97, never])) as (listener, connections):
        served = [await trio.testing.open_stream_to_socket_listener(listener) for _ in range(2)]
        for client in served:
            await client.send_all(post(stream=True))
            assert b" 200 " in bytes(await client.receive_some())
        turned_away = await trio.testing.open_stream_to_socket_listener(listener)
        assert await turned_away.receive_some() == b""
        for client in served:
            await client.aclose()
        await connections.wait_empty()
        again = await trio.testing.open_stream_to_socket_listener(listener)
        await again.send_all(request)
        assert b" 200 " in bytes(await again.receive_some())
        await again.aclose()
        await turned_away.aclose()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pipelining_client_that_leaves(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PROBE_SECS", 0.01)
    never = trio.Event()
    generator = ScriptedGenerator(lambda request: [97, never])
    async with listening(generator) as (listener, connections):
        client = await trio.testing.open_stream_to_socket_listener(listener)
        await client.send_all(post(stream=stream) * 2)
        while not generator.active:
            await trio.lowlevel.checkpoint()
        await client.aclose()
        await connections.wait_empty()
    assert generator.active == 0


async def test_many_clients_that_leave_anywhere() -> None:
    chance = random.Random(5)
    generator = ScriptedGenerator(lambda request: [97] * chance.randrange(300))
    async with listening(generator) as (listener, connections):

        async def visit() -> None:
            client = await trio.testing.open_stream_to_socket_listener(listener)
            request = post(stream=chance.random() < 0.7) * chance.choice([1, 1, 2])
            await client.send_all(request[: chance.choice([len(request), chance.randrange(len(request))])])
            for _ in range(chance.randrange(30)):
                await trio.lowlevel.checkpoint()
            if chance.random() < 0.5:
                reset(client)
            else:
                await client.aclose()

        for _ in range(4):
            async with trio.open_nursery() as nursery:
                for _ in range(25):
                    nursery.start_soon(visit)
        # Those that were not accepted yet are accepted before this one.
        last = await trio.testing.open_stream_to_socket_listener(listener)
        await last.send_all(post())
        assert b" 200 " in bytes(await last.receive_some())
        await last.aclose()
        await connections.wait_empty()
    assert generator.active == 0


async def test_a_new_client_takes_the_place_of_the_idlest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENTS", 3)
    never = trio.Event()
    generator = ScriptedGenerator(lambda request: [97, never])
    async with listening(generator) as (listener, connections):

        async def ask(client: trio.SocketStream) -> None:
            await client.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += await client.receive_some()

        busy = await trio.testing.open_stream_to_socket_listener(listener)
        await busy.send_all(post(stream=True))
        assert b" 200 " in bytes(await busy.receive_some())
        first = await trio.testing.open_stream_to_socket_listener(listener)
        await ask(first)
        second = await trio.testing.open_stream_to_socket_listener(listener)
        await ask(second)
        await ask(first)  # now the second one has been idle for longer
        new = await trio.testing.open_stream_to_socket_listener(listener)
        await ask(new)
        assert await second.receive_some() == b""
        await ask(first)
        assert connections.count == 3
        assert generator.active == 1
        for stream in (busy, first, second, new):
            await stream.aclose()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_interrupt_that_hits_a_request_ends_the_server(stream: bool) -> None:
    """Trio raises it in whichever task runs when the signal comes."""

    def script(_: Any) -> Any:
        raise KeyboardInterrupt

    async def ask() -> None:
        async with serving(ScriptedGenerator(script)) as url, httpx.AsyncClient(base_url=url) as http:
            with contextlib.suppress(httpx.HTTPError):
                await http.post("/v1/completions", json=completion_body(stream=stream))
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await ask()
    assert caught.value.split(KeyboardInterrupt)[1] is None

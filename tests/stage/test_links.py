"""One battery that every link backend passes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from skippy.config import Endpoint
from skippy.stage.links import Link, LinkClosed, MemoryTransport, TcpTransport, Transport
from skippy.stage.links.tcp import TcpLink, refuse_self_connection

BACKENDS = {"memory": MemoryTransport, "tcp": TcpTransport}


@attrs.frozen
class Pair:
    near: Link
    far: Link


@pytest.fixture(params=BACKENDS)
def transport(request: pytest.FixtureRequest) -> Transport:
    return BACKENDS[request.param]()


@contextlib.asynccontextmanager
async def linked(transport: Transport) -> AsyncIterator[Pair]:
    with trio.fail_after(10):
        listener = await transport.listen(Endpoint("127.0.0.1", 0))
        near = await transport.connect(listener.endpoint)
        far = await listener.accept()
        try:
            yield Pair(near, far)
        finally:
            near.close()
            far.close()
            listener.close()


async def read_exactly(link: Link, count: int) -> bytes:
    data = bytearray(count)
    filled = 0
    while filled < count:
        received = await link.receive_into(memoryview(data)[filled:])
        assert received > 0
        filled += received
    return bytes(data)


async def send_for_ever(link: Link) -> None:
    while True:
        await link.send([bytes(1_000_000)])


async def test_buffers_arrive_joined_in_order_both_ways(transport: Transport) -> None:
    floats = np.arange(3, dtype="<f4")
    async with linked(transport) as pair, trio.open_nursery() as nursery:
        for sender, receiver in ((pair.near, pair.far), (pair.far, pair.near)):
            nursery.start_soon(sender.send, [b"head", b"", floats.data, bytearray(b"tail")])
            assert await read_exactly(receiver, 20) == b"head" + floats.tobytes() + b"tail"


async def test_large_buffers_cross_while_the_reader_is_slow(transport: Transport) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3_000_000, dtype=np.uint8)
    async with linked(transport) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(pair.near.send, [data[:1].data, data[1:].data])
        await trio.testing.wait_all_tasks_blocked()
        assert await read_exactly(pair.far, data.size) == data.tobytes()


async def test_send_waits_for_a_reader_that_takes_nothing(transport: Transport) -> None:
    async with linked(transport) as pair:
        with trio.move_on_after(0.2) as scope:
            await send_for_ever(pair.near)
        assert scope.cancelled_caught


async def test_a_closed_peer_is_an_end_of_stream_after_its_bytes(transport: Transport) -> None:
    async with linked(transport) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.near.send, [b"last words"])
            assert await read_exactly(pair.far, 10) == b"last words"
        pair.near.close()
        assert await pair.far.receive_into(memoryview(bytearray(8))) == 0


async def test_sending_to_a_closed_peer_is_link_closed(transport: Transport) -> None:
    async with linked(transport) as pair:
        pair.far.close()
        with pytest.raises(LinkClosed):
            await send_for_ever(pair.near)


@pytest.mark.parametrize("action", ["send", "receive_into"])
async def test_closing_wakes_the_task_that_waits(transport: Transport, action: str) -> None:
    async def wait() -> None:
        with pytest.raises(LinkClosed):
            await (send_for_ever(pair.near) if action == "send" else read_exactly(pair.near, 1))

    async with linked(transport) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        pair.near.close()
        pair.near.close()


async def test_using_a_closed_link_is_link_closed(transport: Transport) -> None:
    async with linked(transport) as pair:
        pair.near.close()
        with pytest.raises(LinkClosed):
            await pair.near.send([b"x"])
        with pytest.raises(LinkClosed):
            await pair.near.receive_into(memoryview(bytearray(1)))


async def test_connecting_where_nobody_listens_is_refused(transport: Transport) -> None:
    with trio.fail_after(10):
        listener = await transport.listen(Endpoint("127.0.0.1", 0))
        endpoint = listener.endpoint
        listener.close()
        with pytest.raises(OSError, match=r"refused|nothing listens"):
            await transport.connect(endpoint)


async def test_an_endpoint_is_taken_once(transport: Transport) -> None:
    with trio.fail_after(10):
        listener = await transport.listen(Endpoint("127.0.0.1", 0))
        with pytest.raises(OSError, match=f"127.0.0.1:{listener.endpoint.port}"):
            await transport.listen(listener.endpoint)
        listener.close()
        (await transport.listen(listener.endpoint)).close()


async def test_closing_a_listener_wakes_accept(transport: Transport) -> None:
    async def accept() -> None:
        with pytest.raises(LinkClosed):
            await listener.accept()

    with trio.fail_after(10):
        listener = await transport.listen(Endpoint("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await trio.testing.wait_all_tasks_blocked()
            listener.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has no such option")
async def test_tcp_asks_for_signs_of_life_from_an_idle_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = trio.socket.from_stdlib_socket(socket.create_connection(server.getsockname()))
        link = TcpLink(sock, "peer")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        link.close()


async def test_tcp_connects_from_the_pinned_address() -> None:
    transport = TcpTransport()
    with trio.fail_after(10):
        listener = await transport.listen(Endpoint("127.0.0.2", 0))
        near = await transport.connect(listener.endpoint, source_host="127.0.0.3")
        far = await listener.accept()
        assert far.peer.startswith("127.0.0.3:")
        for thing in (near, far, listener):
            thing.close()


async def test_tcp_notices_a_connection_to_itself() -> None:
    """What happens once in thousands of attempts to reach a stage that has not started yet."""
    with trio.socket.socket() as sock:
        await sock.bind(("127.0.0.1", 0))
        own = sock.getsockname()
        await sock.connect(own)
        with pytest.raises(ConnectionRefusedError, match="nothing listens"):
            refuse_self_connection(sock, Endpoint(*own))
    with trio.fail_after(10):
        (await TcpTransport().listen(Endpoint(*own))).close()


async def test_tcp_refuses_a_pinned_address_of_another_family() -> None:
    with trio.fail_after(10), pytest.raises(OSError, match="no IPv6 address"):
        await TcpTransport().connect(Endpoint("127.0.0.1", 9), source_host="::1")


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid"])
async def test_a_host_that_is_none_is_an_error_of_its_endpoint(host: str) -> None:
    for attempt in (TcpTransport().connect, TcpTransport().listen):
        with trio.fail_after(10), pytest.raises(OSError, match=host) as caught:
            await attempt(Endpoint(host, 9))
        assert "Unknown error" not in str(caught.value)


async def test_a_refused_connection_says_no_more_than_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError) as caught:
        await TcpTransport().connect(Endpoint("127.0.0.1", port))
    assert caught.value.strerror == "Connection refused"

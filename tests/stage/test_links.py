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

from bench.ports import reserve_port
from skippy.config import Endpoint, WireConditions
from skippy.sim.clock import SimClock
from skippy.sim.faults import PERFECT, Conditions
from skippy.sim.network import SimNetwork
from skippy.stage.links import (
    ConditionedTransport,
    Link,
    LinkClosed,
    Listener,
    MemoryTransport,
    TcpTransport,
    TlsFiles,
    TlsTransport,
    Transport,
    WebSocketTransport,
)
from skippy.stage.links.tcp import TcpLink, refuse_self_connection
from tests.support.certificates import Certificates


@attrs.frozen
class Backend:
    """A transport and how to name an endpoint of it."""

    transport: Transport
    scheme: str = "tcp"
    host: str = "127.0.0.1"

    def any_port(self) -> Endpoint:
        return Endpoint(self.host, 0, self.scheme)


BACKENDS = ["memory", "tcp", "tls", "mutual tls", "ws", "wss", "conditioned memory", "conditioned tcp"]
BACKENDS += ["simulated", "simulated slices"]
WIRE = WireConditions(delay_ms=1, mbps=1e6, jitter_ms=0.1, stall_ms=0.1, stall_probability=0.5)


@attrs.frozen
class Pair:
    near: Link
    far: Link


class Sides(Transport):
    """TLS with different files on the listening and the dialling side."""

    def __init__(self, listening: TlsFiles, dialling: TlsFiles) -> None:
        self._listening = TlsTransport(TcpTransport(), listening)
        self._dialling = TlsTransport(TcpTransport(), dialling)

    async def listen(self, endpoint: Endpoint) -> Listener:
        return await self._listening.listen(endpoint)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        return await self._dialling.connect(endpoint, source_host=source_host)


def make_backend(name: str, nursery: trio.Nursery, files: Certificates) -> Backend:
    kind, _, inner = name.partition(" ")
    if kind == "conditioned":
        plain = make_backend(inner, nursery, files).transport
        return Backend(ConditionedTransport(plain, WIRE, nursery))
    if kind == "simulated":
        conditions = Conditions(slices=9_000, partial=0.5, capacity=50_000) if inner else PERFECT
        return Backend(SimNetwork(1, conditions, clock=SimClock()).of("test"))
    tls = TlsTransport(TcpTransport(), files.files())
    backends = {
        "memory": Backend(MemoryTransport()),
        "tcp": Backend(TcpTransport()),
        "tls": Backend(Sides(files.files(ca=None), files.files(cert=None)), "tls"),
        "mutual": Backend(tls, "tls"),
        "ws": Backend(WebSocketTransport(TcpTransport(), nursery, "ws", "tcp"), "ws"),
        "wss": Backend(WebSocketTransport(tls, nursery, "wss", "tls"), "wss"),
    }
    return backends[kind]


@pytest.fixture(params=BACKENDS)
async def backend(
    request: pytest.FixtureRequest, nursery: trio.Nursery, certificates: Certificates
) -> Backend:
    return make_backend(request.param, nursery, certificates)


@contextlib.asynccontextmanager
async def linked(backend: Backend) -> AsyncIterator[Pair]:
    with trio.fail_after(10):
        listener = await backend.transport.listen(backend.any_port())
        near = await backend.transport.connect(listener.endpoint)
        far = await listener.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.handshake)
            nursery.start_soon(far.handshake)
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


async def test_buffers_arrive_joined_in_order_both_ways(backend: Backend) -> None:
    floats = np.arange(3, dtype="<f4")
    async with linked(backend) as pair, trio.open_nursery() as nursery:
        for sender, receiver in ((pair.near, pair.far), (pair.far, pair.near)):
            nursery.start_soon(sender.send, [b"head", b"", floats.data, bytearray(b"tail")])
            assert await read_exactly(receiver, 20) == b"head" + floats.tobytes() + b"tail"


async def test_large_buffers_cross_while_the_reader_is_slow(backend: Backend) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3_000_000, dtype=np.uint8)
    async with linked(backend) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(pair.near.send, [data[:1].data, data[1:].data])
        await trio.testing.wait_all_tasks_blocked()
        assert await read_exactly(pair.far, data.size) == data.tobytes()


async def test_send_waits_for_a_reader_that_takes_nothing(backend: Backend) -> None:
    async with linked(backend) as pair:
        with trio.move_on_after(0.2) as scope:
            await send_for_ever(pair.near)
        assert scope.cancelled_caught


async def test_a_closed_peer_is_an_end_of_stream_after_its_bytes(backend: Backend) -> None:
    async with linked(backend) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.near.send, [b"last words"])
            assert await read_exactly(pair.far, 10) == b"last words"
        pair.near.close()
        assert await pair.far.receive_into(memoryview(bytearray(8))) == 0


async def test_sending_to_a_closed_peer_is_link_closed(backend: Backend) -> None:
    async with linked(backend) as pair:
        pair.far.close()
        with pytest.raises(LinkClosed):
            await send_for_ever(pair.near)


@pytest.mark.parametrize("action", ["send", "receive_into"])
async def test_closing_wakes_the_task_that_waits(backend: Backend, action: str) -> None:
    async def wait() -> None:
        with pytest.raises(LinkClosed):
            await (send_for_ever(pair.near) if action == "send" else read_exactly(pair.near, 1))

    async with linked(backend) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        pair.near.close()
        pair.near.close()


async def test_using_a_closed_link_is_link_closed(backend: Backend) -> None:
    async with linked(backend) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(pair.far.send, [b"x"])
        assert await pair.near.receive_into(memoryview(bytearray(8))) == 1
        pair.near.close()
        for _ in range(3):  # however often
            with pytest.raises(LinkClosed):
                await pair.near.send([b"x"])
            with pytest.raises(LinkClosed):
                await pair.near.receive_into(memoryview(bytearray(1)))


async def test_connecting_where_nobody_listens_is_refused(backend: Backend) -> None:
    with trio.fail_after(10):
        listener = await backend.transport.listen(backend.any_port())
        endpoint = listener.endpoint
        listener.close()
        with pytest.raises(OSError, match=r"refused|nothing listens"):
            await backend.transport.connect(endpoint)


async def test_an_endpoint_is_taken_once(backend: Backend) -> None:
    with trio.fail_after(10):
        listener = await backend.transport.listen(backend.any_port())
        with pytest.raises(OSError, match=f"127.0.0.1:{listener.endpoint.port}"):
            await backend.transport.listen(listener.endpoint)
        listener.close()
        (await backend.transport.listen(listener.endpoint)).close()


async def test_closing_a_listener_wakes_accept(backend: Backend) -> None:
    async def accept() -> None:
        with pytest.raises(LinkClosed):
            await listener.accept()

    with trio.fail_after(10):
        listener = await backend.transport.listen(backend.any_port())
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
    with pytest.raises(ConnectionRefusedError) as caught:
        await TcpTransport().connect(Endpoint("127.0.0.1", reserve_port()))
    assert caught.value.strerror == "Connection refused"


async def test_tcp_gives_at_once_what_has_arrived() -> None:
    with trio.fail_after(10):
        async with contextlib.AsyncExitStack() as stack:
            transport = TcpTransport()
            listener = await transport.listen(Endpoint("127.0.0.1", 0))
            stack.callback(listener.close)
            dialled = await transport.connect(listener.endpoint)
            stack.callback(dialled.close)
            accepted = await listener.accept()
            stack.callback(accepted.close)
            buffer = memoryview(bytearray(4))
            assert accepted.receive_nowait(buffer) is None
            await dialled.send([b"abcdef"])
            assert await accepted.receive_into(buffer) == 4
            assert accepted.receive_nowait(buffer) == 2
            assert bytes(buffer) == b"efcd"
            assert accepted.receive_nowait(buffer) is None
            await dialled.send([b"gh"])
            dialled.close()
            assert await accepted.receive_into(buffer[:2]) == 2
            assert accepted.receive_nowait(buffer) == 0

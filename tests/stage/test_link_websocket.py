"""WebSocket links: any binary messages carry the stream; what does not fit ends the link, with a reason."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import pytest
import trio
import trio_websocket

from skippy.config import Endpoint
from skippy.stage.links import Link, LinkClosed, TcpTransport, WebSocketTransport
from skippy.stage.links.websocket import MAX_MESSAGE_BYTES

ANY = Endpoint("127.0.0.1", 0, "ws")


@contextlib.asynccontextmanager
async def listening(nursery: trio.Nursery) -> AsyncIterator[tuple[Endpoint, trio.MemoryReceiveChannel[Link]]]:
    """A listener whose links arrive, after their handshake, on a channel."""
    send, receive = trio.open_memory_channel[Link](10)
    listener = await WebSocketTransport(TcpTransport(), nursery, "ws", "tcp").listen(ANY)

    async def accept() -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                link = await listener.accept()
                nursery.start_soon(admit, link)

    async def admit(link: Link) -> None:
        with contextlib.suppress(LinkClosed):
            await link.handshake()
        await send.send(link)

    nursery.start_soon(accept)
    with trio.fail_after(10):
        yield listener.endpoint, receive
    listener.close()


async def read_exactly(link: Link, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        buffer = bytearray(min(3, count - len(data)))
        received = await link.receive_into(memoryview(buffer))
        assert received
        data += buffer[:received]
    return bytes(data)


async def test_message_boundaries_mean_nothing(nursery: trio.Nursery) -> None:
    async with (
        listening(nursery) as (endpoint, links),
        trio_websocket.open_websocket_url(endpoint.url) as peer,
    ):
        link = await links.receive()
        for message in (b"", b"a", b"bcdef", b"", b"gh"):
            await peer.send_message(message)
        assert await read_exactly(link, 8) == b"abcdefgh"
        await link.send([b"head", b"", bytes(600_000), b"tail"])
        received = b""
        while len(received) < 600_008:
            message = await peer.get_message()
            assert isinstance(message, bytes)
            assert len(message) <= MAX_MESSAGE_BYTES
            received += message
        assert received == b"head" + bytes(600_000) + b"tail"
        link.close()
        with pytest.raises(trio_websocket.ConnectionClosed):
            await peer.get_message()
        assert peer.closed is not None
        assert peer.closed.code == 1000


async def test_pings_are_answered(nursery: trio.Nursery) -> None:
    async with (
        listening(nursery) as (endpoint, links),
        trio_websocket.open_websocket_url(endpoint.url) as peer,
    ):
        link = await links.receive()
        await peer.ping(b"there?")
        link.close()


async def test_a_text_message_ends_the_link(nursery: trio.Nursery) -> None:
    async with (
        listening(nursery) as (endpoint, links),
        trio_websocket.open_websocket_url(endpoint.url) as peer,
    ):
        link = await links.receive()
        await peer.send_message("hello")
        with pytest.raises(LinkClosed, match="sent a text message"):
            await link.receive_into(memoryview(bytearray(1)))
        link.close()


async def test_a_message_too_long_ends_the_link(nursery: trio.Nursery) -> None:
    async with (
        listening(nursery) as (endpoint, links),
        trio_websocket.open_websocket_url(endpoint.url) as peer,
    ):
        link = await links.receive()
        await peer.send_message(bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(LinkClosed, match="code 1009"):
            await link.receive_into(memoryview(bytearray(1)))
        link.close()


async def test_a_browser_is_refused(nursery: trio.Nursery) -> None:
    """Any page may open a WebSocket to a loopback address, and its browser says where the page is from."""
    async with listening(nursery) as (endpoint, links):
        with pytest.raises(trio_websocket.ConnectionRejected) as caught:
            async with trio_websocket.open_websocket_url(
                endpoint.url, extra_headers=[(b"Origin", b"https://evil.example")]
            ):
                pass
        assert caught.value.status_code == 403
        link = await links.receive()
        with pytest.raises(LinkClosed, match="a browser's page is no stage"):
            await link.handshake()
        link.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", "HTTP status 502 instead of a WebSocket"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "failed: "),
        (b"", "the connection ended during the WebSocket handshake"),
    ],
)
async def test_what_answers_may_be_no_stage(nursery: trio.Nursery, answer: bytes, text: str) -> None:
    transport = WebSocketTransport(TcpTransport(), nursery, "ws", "tcp")
    with trio.fail_after(10):
        listener = await TcpTransport().listen(Endpoint("127.0.0.1", 0))
        near = await transport.connect(listener.endpoint)
        far = await listener.accept()

        async def serve() -> None:
            await far.receive_into(memoryview(bytearray(4096)))
            if answer:
                await far.send([answer])
            far.close()

        nursery.start_soon(serve)
        with pytest.raises(LinkClosed, match=text):
            await near.handshake()
        near.close()
        listener.close()


async def test_what_connects_may_be_no_stage(nursery: trio.Nursery) -> None:
    async with listening(nursery) as (endpoint, links):
        for request in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x41\x54\x4b\x53\x03abc\r\n\r\n", b""):
            near = await TcpTransport().connect(endpoint)
            await near.send([request])
            if not request:
                near.close()
            link = await links.receive()
            with pytest.raises(LinkClosed, match="the WebSocket handshake with"):
                await link.handshake()
            link.close()
            near.close()


@pytest.mark.parametrize("upgraded", [False, True])
async def test_random_bytes_end_a_link_and_nothing_else(nursery: trio.Nursery, upgraded: bool) -> None:
    dice = random.Random(5)
    request = (
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    async with listening(nursery) as (endpoint, links):
        for _ in range(60):
            near = await TcpTransport().connect(endpoint)
            await near.send([request if upgraded else b"", dice.randbytes(dice.randrange(1, 200))])
            near.close()
            link = await links.receive()
            with contextlib.suppress(LinkClosed):
                while await link.receive_into(memoryview(bytearray(100))):
                    pass
            link.close()


async def test_a_connection_cut_off_is_not_an_end_of_stream(nursery: trio.Nursery) -> None:
    async with listening(nursery) as (endpoint, links):
        near = await WebSocketTransport(TcpTransport(), nursery, "ws", "tcp").connect(endpoint)
        await near.handshake()
        link = await links.receive()
        near._inner.close()  # type: ignore[attr-defined]
        with pytest.raises(LinkClosed, match="cut off"):
            await link.receive_into(memoryview(bytearray(1)))
        for thing in (near, link):
            thing.close()

"""Peers that do what no peer of ours does: to run against a stage, in this process or in another one.

An attack is over when the stage has closed the connection. It is recorded with the address that it came from
and a pattern of the reason, which the stage must have reported for that address.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import attrs
import trio

from skippy.protocol import (
    AdmissionRequest,
    DialerHandshake,
    Message,
    MessageKind,
    Reply,
    ReplyDecoder,
    default_state,
    encode_admission,
    encode_message,
    encode_transport_auth,
)

PATIENCE_SECS: Final = 20.0
K = MessageKind


@attrs.frozen
class Target:
    """A stage to attack, as somebody knows it who has read the chain's configuration.

    Attributes:
        request: a lane that the stage admits.
        batch_rows: most tokens of a frame.
    """

    host: str
    port: int
    token: bytes
    request: AdmissionRequest
    batch_rows: int = 512

    @property
    def index(self) -> int:
        return self.request.target_index

    @property
    def width(self) -> int:
        return self.request.activation_width

    def frame(self, kind: MessageKind, position: int = 0, tokens: Sequence[int] = (), **fields: Any) -> bytes:
        """A frame as the stage before would send it.

        Args:
            fields: of the message, its header (``phase``, ``source`` …), or ``width`` and ``value`` of the
                activation.
        """
        width, value = fields.pop("width", self.width), fields.pop("value", 0.25)
        ids = {"request_id": fields.pop("request_id", 7), "session_id": fields.pop("session_id", 8)}
        content = {n: fields.pop(n) for n in ("sampling", "chat_sampling_metadata") if n in fields}
        count = fields.pop("count", len(tokens))
        source = fields.pop("source", self.index - 1)
        state = attrs.evolve(
            default_state(kind), source_stage_index=source if tokens else -1, current_token=-1, **fields
        )
        row = struct.pack("<f", value) * (width if self.index else 0)
        message = Message(
            kind,
            state,
            pos_start=position,
            token_count=count,
            tokens=tuple(tokens),
            activation=row * len(tokens),
            **ids,
            **content,
        )
        return b"".join(encode_message(message))

    @contextlib.asynccontextmanager
    async def connected(self, receive_buffer: int | None = None) -> AsyncIterator[Peer]:
        """A connection on which nothing has been said."""
        sock = trio.socket.socket()
        try:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await sock.connect((self.host, self.port))
            yield Peer(trio.SocketStream(sock))
        finally:
            sock.close()

    @contextlib.asynccontextmanager
    async def authenticated(self) -> AsyncIterator[Peer]:
        """A connection on which the token was shown and the ready word has come."""
        async with self.connected() as peer:
            await peer.shake_hands(DialerHandshake(self.token))
            yield peer

    @contextlib.asynccontextmanager
    async def admitted(self, **options: Any) -> AsyncIterator[Peer]:
        """A lane."""
        async with self.connected(**options) as peer:
            await peer.shake_hands(DialerHandshake(self.token, self.request))
            yield peer


class Peer:
    """The hostile end of one connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.address = "{}:{}".format(*stream.socket.getsockname()[:2])
        self._decoder = ReplyDecoder()

    async def shake_hands(self, handshake: DialerHandshake) -> None:
        await self.stream.send_all(handshake.data_to_send())
        while not handshake.admitted:
            handshake.receive_data(await self._receive(handshake.bytes_wanted))
            await self.stream.send_all(handshake.data_to_send())

    async def _receive(self, size: int) -> bytes:
        data = await self.stream.receive_some(size)
        assert data, "the stage closed the connection"
        return bytes(data)

    async def send(self, data: bytes, piece: int = 0) -> None:
        """Send, in pieces of that many bytes; that the stage has closed the connection is no error."""
        with contextlib.suppress(trio.BrokenResourceError):
            for start in range(0, len(data), piece or max(1, len(data))):
                await self.stream.send_all(data[start : start + (piece or len(data))])

    async def finish(self) -> None:
        with contextlib.suppress(trio.BrokenResourceError, OSError):
            await self.stream.send_eof()

    async def reply(self) -> Reply:
        """The next reply; AssertionError at the end of the stream."""
        while (reply := self._decoder.next_reply()) is None:
            self._decoder.receive_data(await self._receive(4096))
        return reply

    async def closed(self, attack: str) -> None:
        """Wait until the stage has closed the connection; what it sends until then does not matter."""
        with trio.move_on_after(PATIENCE_SECS) as scope, contextlib.suppress(trio.BrokenResourceError):
            while await self.stream.receive_some(65536):
                pass
        assert not scope.cancelled_caught, f"{attack}: the stage keeps the connection"


@attrs.frozen
class Ended:
    """A connection that the stage closed.

    Attributes:
        name: of the attack.
        address: of the attacker.
        reason: a pattern that the stage's report of this address must match.
    """

    name: str
    address: str
    reason: str


Report = list[Ended]


# -- connections that are kept open -------------------------------------------------------------------------


async def silent(target: Target) -> None:
    async with target.connected():
        await trio.sleep_forever()


async def half_a_token(target: Target) -> None:
    async with target.connected() as peer:
        await peer.send(encode_transport_auth(target.token)[:-1])
        await trio.sleep_forever()


async def half_an_admission(target: Target) -> None:
    async with target.authenticated() as peer:
        await peer.send(encode_admission(target.request)[:-1])
        await trio.sleep_forever()


async def half_a_frame(target: Target) -> None:
    """A live request that does not go on."""
    async with target.admitted() as peer:
        prefill = target.frame(K.PREFILL_EMBD, 0, range(4))
        await peer.send(prefill + target.frame(K.PREFILL_EMBD, 4, range(4))[:-3])
        await trio.sleep_forever()


async def reads_nothing(target: Target) -> None:
    """Questions whose answers stay in the stage until it can send no more."""
    async with target.admitted(receive_buffer=2048) as peer:
        question = target.frame(K.PROBE_PREFILL, 0, [1, 2], source=-1, width=0)
        while True:
            await peer.send(question * 50)
            await trio.lowlevel.checkpoint()


HELD: Final[Sequence[Callable[[Target], Awaitable[None]]]] = (
    silent,
    half_a_token,
    half_an_admission,
    half_a_frame,
    reads_nothing,
)


@contextlib.asynccontextmanager
async def besieged(target: Target, strangers: int) -> AsyncIterator[None]:
    """The stage holds one connection of each kind that does not end, and ``strangers`` that say nothing."""
    async with trio.open_nursery() as nursery:
        for attack in HELD:
            nursery.start_soon(attack, target)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(strangers):
                await stack.enter_async_context(target.connected())
            yield
        nursery.cancel_scope.cancel()

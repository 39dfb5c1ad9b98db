"""A stage played by the test: it answers what the test says, when the test says so."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import attrs

from skippy.config import Endpoint, StageOptions
from skippy.engine.toy import ToyEngine
from skippy.protocol import (
    Buffer,
    Message,
    MessageDecoder,
    MessageKind,
    Reply,
    default_state,
    encode_message,
    encode_reply,
)
from skippy.stage import Stage, open_stage
from skippy.stage.admission import StageAdmission
from skippy.stage.framing import receive_message
from skippy.stage.links import Link, Listener, MemoryTransport, Transport
from tests.support.admission import admit_peer, engine_admission
from tests.support.cluster import toy_config
from tests.support.dialing import dial_stage

RANGES = [(0, 3), (3, 6)]
ENDPOINTS = ["127.0.0.1:20000", "127.0.0.1:20001"]


def last_admission(heartbeats: bool = False) -> StageAdmission:
    """What the scripted last stage says of itself."""
    config = toy_config(1, RANGES, ENDPOINTS)
    return engine_admission(config, ToyEngine(*RANGES[1], 6).info, heartbeats=heartbeats)


@attrs.define
class ScriptedLane:
    """One lane that stage 0 has dialled, seen from the last stage."""

    stage: Stage
    link: Link
    decoder: MessageDecoder
    returns: Link | None = None

    async def receive(self, kind: MessageKind) -> Message:
        """The next message, which must be of ``kind``."""
        message = await receive_message(self.link, self.decoder)
        assert message is not None
        assert message.kind is kind
        return message

    async def acknowledge(self) -> None:
        await self.link.send([encode_reply(Reply.ack())])

    async def configure(self) -> None:
        """Take ConfigureGeneration, open the return stream, acknowledge."""
        message = await self.receive(MessageKind.CONFIGURE_GENERATION)
        if self.returns is None:
            await self.open_returns(message)
        await self.acknowledge()

    async def open_returns(self, message: Message) -> None:
        """Dial stage 0 for the return stream of the lane that ``message`` came on."""
        transport = self.stage.context.transport
        self.returns = await dial_stage(transport, self.stage.endpoint, request=last_admission().stage_zero)
        kind = MessageKind.PREDICTION_RETURN_OPEN
        opening = Message(
            kind, default_state(kind), request_id=message.request_id, session_id=message.session_id
        )
        await self.returns.send(encode_message(opening))

    async def predict(self, token: int) -> None:
        """Take one decode step and answer it."""
        await self.receive(MessageKind.DECODE_EMBD)
        assert self.returns is not None
        await self.returns.send([encode_reply(Reply.predicted_token(token))])

    async def stop(self) -> None:
        await self.receive(MessageKind.STOP)
        await self.acknowledge()


@attrs.define
class ScriptedPeer:
    """The last of two stages; the first is real."""

    stage: Stage
    listener: Listener

    async def accept(self) -> ScriptedLane:
        """The next lane, ready."""
        link = await self.listener.accept()
        await admit_peer(link, last_admission().loaded)
        width = self.stage.info.output_width
        return ScriptedLane(self.stage, link, MessageDecoder(width, max_activation_bytes=1 << 20))


@contextlib.asynccontextmanager
async def scripted_peer(
    options: StageOptions | None = None,
    *,
    inline: bool = False,
    transport: Transport | None = None,
    endpoints: Sequence[str] = ENDPOINTS,
) -> AsyncIterator[ScriptedPeer]:
    """A real toy stage 0 in front of a scripted last stage, over memory links unless said otherwise."""
    transport = transport or MemoryTransport()
    listener = await transport.listen(Endpoint.parse(endpoints[1], allow_any_port=True))
    try:
        async with open_stage(
            toy_config(0, RANGES, [endpoints[0], str(listener.endpoint)]),
            None,
            options or StageOptions(),
            lambda: ToyEngine(0, 3, 6),
            transport=transport,
            inline=inline,
        ) as stage:
            yield ScriptedPeer(stage, listener)
    finally:
        listener.close()


class HookedLink(Link):
    """Calls ``on_data`` when something has arrived, before the reader sees it."""

    def __init__(self, inner: Link, on_data: Callable[[], None]) -> None:
        self._inner = inner
        self._on_data = on_data

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def send(self, buffers: Sequence[Buffer]) -> None:
        await self._inner.send(buffers)

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        return self._inner.send_nowait(buffers)

    async def receive_into(self, buffer: memoryview) -> int:
        count = await self._inner.receive_into(buffer)
        self._on_data()
        return count

    def close(self) -> None:
        self._inner.close()


class HookedTransport(MemoryTransport):
    """Memory links whose dialling side calls ``on_data`` for all that arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.on_data: Callable[[], None] = lambda: None

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        return HookedLink(await super().connect(endpoint, source_host=source_host), lambda: self.on_data())

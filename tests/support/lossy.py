"""Memory links that break at a chosen frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

import attrs

from skippy.config import Endpoint
from skippy.protocol import Buffer, MessageKind
from skippy.stage.links import Link, LinkClosed, MemoryTransport

Fate = Literal["lose", "deliver and break", None]
"""Of a frame: the link breaks before it, or right behind it, or not."""
HIGHEST_KIND: Final = max(MessageKind)


@attrs.frozen
class Frame:
    """A frame that is about to be sent by the side that dialled: on a lane, or replies on a return stream.

    Attributes:
        port: of the endpoint that was dialled; in a toy cluster that of stage ``n`` is 20000 + ``n``.
        kind: the frame's first word.
        number: counts frames to this port, from 0.
        link: counts connections to any port, from 0.
        prompt_tokens: the prompt_token_count of its header, on a lane.
    """

    port: int
    kind: int
    number: int
    link: int
    prompt_tokens: int


class LossyTransport(MemoryTransport):
    """Asks ``fate`` about each frame that a dialling side sends; handshakes are no frames.

    Attributes:
        frames: what has been sent.
        links: what is connected.
        connected: how many connections there have been.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fate: Callable[[Frame], Fate] = lambda _: None
        self.frames: list[Frame] = []
        self.links: list[LossyLink] = []
        self.connected = 0

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        inner = await super().connect(endpoint, source_host=source_host)
        link = LossyLink(inner, endpoint.port, self, self.connected)
        self.connected += 1
        self.links.append(link)
        return link

    def count(self, port: int) -> int:
        return sum(frame.port == port for frame in self.frames)

    def break_links(self, port: int) -> None:
        """End all connections that were dialled to this port."""
        for link in [link for link in self.links if link.port == port]:
            link.close()


class LossyLink(Link):
    def __init__(self, inner: Link, port: int, transport: LossyTransport, number: int) -> None:
        self._inner = inner
        self._transport = transport
        self.port = port
        self.number = number

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def send(self, buffers: Sequence[Buffer]) -> None:
        data = b"".join(map(bytes, buffers))
        kind, prompt_tokens = (int.from_bytes(data[at : at + 4], "little", signed=True) for at in (0, 40))
        if not 0 < kind <= HIGHEST_KIND:
            await self._inner.send(buffers)
            return
        frame = Frame(self.port, kind, self._transport.count(self.port), self.number, prompt_tokens)
        fate = self._transport.fate(frame)
        if fate == "lose":
            self.close()
            raise LinkClosed(f"{self.peer} was lost")
        self._transport.frames.append(frame)
        await self._inner.send(buffers)
        if fate == "deliver and break":
            self.close()

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        return self._inner.send_nowait(buffers)

    async def receive_into(self, buffer: memoryview) -> int:
        return await self._inner.receive_into(buffer)

    def close(self) -> None:
        self._inner.close()
        if self in self._transport.links:
            self._transport.links.remove(self)

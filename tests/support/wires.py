"""Memory links on which things go wrong when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from skippy.config import Endpoint
from skippy.protocol import Buffer
from skippy.stage.links import Link, LinkClosed, MemoryTransport

GARBAGE = b"\xa5" * 64
BYTE_SECS = 0.5


class Wire(Link):
    """The dialling side of a memory link; a fault on it is one of the network, or of either peer.

    Attributes:
        fault: what is wrong. ``stall``: nothing passes any more, not even the end of the stream. ``mute``:
            nothing comes up, ``deaf``: nothing goes down. ``slow up``, ``slow down``: one byte at a time.
            ``garbage up``, ``garbage down``: where the next bytes should be.
    """

    def __init__(self, inner: Link) -> None:
        self._inner = inner
        self._closed = trio.Event()
        self._rest = b""
        self.fault = ""

    def break_it(self, fault: str) -> None:
        """Have one of the faults above, or ``reset``, or the end of one direction: ``half-close``."""
        if fault == "reset":
            self._inner.close()
        elif fault == "half-close":
            self._inner._stream.send_stream.close()  # type: ignore[attr-defined]
        self.fault = fault

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def _hang(self) -> None:
        await self._closed.wait()
        raise LinkClosed(f"the link to {self.peer} is closed")

    async def send(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            await self._send(bytes(buffer))

    async def _send(self, data: bytes) -> None:
        if self.fault in ("stall", "deaf"):
            await self._hang()
        elif self.fault == "slow down":
            for byte in data:
                await self._inner.send([bytes([byte])])
                await trio.sleep(BYTE_SECS)
        else:
            await self._inner.send([GARBAGE if self.fault == "garbage down" else data])

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        return self._inner.send_nowait(buffers)

    async def receive_into(self, buffer: memoryview) -> int:
        if self._rest:
            count = len(self._rest)
            buffer[:count] = self._rest
        else:
            count = await self._inner.receive_into(buffer)
        if self.fault in ("stall", "mute"):
            await self._hang()
        elif self.fault == "slow up" and count:
            self._rest = bytes(buffer[1:count])
            await trio.sleep(BYTE_SECS)
            count = 1
        elif self.fault == "garbage up" and count:
            count = min(len(buffer), len(GARBAGE))
            buffer[:count] = GARBAGE[:count]
        return count

    def close(self) -> None:
        self._closed.set()
        if self.fault != "stall":
            self._inner.close()


class WireTransport(MemoryTransport):
    """Keeps the wires that were dialled, by the stage index of the listener, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.wires: dict[int, list[Wire]] = {}

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        wire = Wire(await super().connect(endpoint, source_host=source_host))
        self.wires.setdefault(endpoint.port - 20_000, []).append(wire)
        return wire

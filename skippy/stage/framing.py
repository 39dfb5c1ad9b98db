"""Between a link and a decoder: receive exactly where the decoder wants the bytes.

How long that may take is for :mod:`skippy.stage.liveness` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import trio

from skippy.protocol import Buffer, Message, MessageDecoder, Reply, ReplyDecoder

from .links import Link, LinkClosed

FRAME_SECS = 60.0
"""How long a frame may take from its first byte to its last, where no heartbeats were agreed. Such a link may
be silent for as long as it likes, but not inside a frame."""

ACCEPT_SECS = 300.0
"""How long a peer may take to accept a frame, which waits there for the frames before it and for memory."""


PART_BYTES = 8 * 1024 * 1024

AT_ONCE_BYTES = 64 * 1024
"""The rest of a frame up to this size is taken without giving others a turn, where it is here already: it is
what a decode step brings, and its way through a stage is every token's."""


class Memory(Protocol):
    """Who decides when there is room for what a peer announces, :class:`skippy.stage.memory.FrameMemory`."""

    async def wait(self) -> None: ...

    def cover(self) -> bool: ...


async def receive_message(
    link: Link, decoder: MessageDecoder, memory: Memory | None = None
) -> Message | None:
    """The next whole message; None when the stream ended between frames.

    Raises RemoteProtocolError for bytes that break a rule or an end inside a frame, LinkClosed for a dead
    link.
    Cancellation loses nothing: bytes received so far stay in the decoder.
    """
    while (message := decoder.next_message()) is None:
        if not await _receive_some(link, decoder, memory):
            return None
    if memory is not None:
        await memory.wait()
    return message


async def send_frame(link: Link, buffers: Sequence[Buffer], seconds: float) -> None:
    """Send a whole frame. Raises LinkClosed, also for a peer that has not taken it after ``seconds``.

    A frame above PART_BYTES has as long for each part of that size: a slow link must only get on.
    A cancelled or failed call may leave half a frame behind: the link is then of no further use.
    """
    for part in _parts(buffers):
        with trio.move_on_after(seconds) as scope:
            await link.send(part)
        if scope.cancelled_caught:
            raise LinkClosed(f"{link.peer} did not take a frame within {seconds:g} s")


def _parts(buffers: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
    """The bytes of a frame in order, at most PART_BYTES at once."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    if sum(view.nbytes for view in views) <= PART_BYTES:
        yield buffers
        return
    for view in views:
        for start in range(0, view.nbytes, PART_BYTES):
            yield [view[start : start + PART_BYTES]]


async def receive_reply(link: Link, decoder: ReplyDecoder) -> Reply | None:
    """The next whole reply; None also where the last frame says that none follows.

    Everything else as :func:`receive_message`.
    """
    while (reply := decoder.next_reply()) is None:
        if decoder.ended or not await _receive_some(link, decoder, None):
            return None
    return reply


async def _receive_some(link: Link, decoder: MessageDecoder | ReplyDecoder, memory: Memory | None) -> bool:
    """Receive once; False at the end of the stream."""
    buffer, received = decoder.get_buffer(), None
    if not decoder.at_boundary:
        if buffer.nbytes <= AT_ONCE_BYTES and (memory is None or memory.cover()):
            received = link.receive_nowait(buffer)
        if received is None and memory is not None:
            await memory.wait()
    if received is None:
        received = await link.receive_into(buffer)
    if received == 0:
        decoder.receive_eof()
        return False
    decoder.buffer_updated(received)
    return True


def allocate(size: int) -> memoryview:
    """A writable buffer of ``size`` bytes whose content is not initialised."""
    return np.empty(size, np.uint8).data

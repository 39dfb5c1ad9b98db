"""Between a link and a decoder: receive exactly where the decoder wants the bytes, and not for ever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import trio

from skippy.protocol import Buffer, Message, MessageDecoder, Reply, ReplyDecoder

from .links import Link, LinkClosed

FRAME_SECS = 60.0
"""How long a frame may take from its first byte to its last. A link may be silent for as long as it likes,
but not inside a frame."""

ACCEPT_SECS = 300.0
"""How long a peer may take to accept a frame, which waits there for the frames before it and for memory."""


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
    link, or one that stays silent inside a frame.
    Cancellation loses nothing: bytes received so far stay in the decoder.
    """
    deadline = math.inf
    while (message := decoder.next_message()) is None:
        received = await _receive_some(link, decoder, deadline, memory)
        if received is None:
            return None
        deadline = received
    if memory is not None:
        await memory.wait()
    return message


async def send_frame(link: Link, buffers: Sequence[Buffer], seconds: float) -> None:
    """Send a whole frame. Raises LinkClosed, also for a peer that has not taken it after ``seconds``.

    A cancelled or failed call may leave half a frame behind: the link is then of no further use.
    """
    with trio.move_on_after(seconds):
        await link.send(buffers)
        return
    raise LinkClosed(f"{link.peer} did not take a frame within {seconds:g} s")


async def receive_reply(link: Link, decoder: ReplyDecoder) -> Reply | None:
    """The next whole reply; None also where the last frame says that none follows.

    Everything else as :func:`receive_message`.
    """
    deadline = math.inf
    while (reply := decoder.next_reply()) is None:
        if decoder.ended:
            return None
        received = await _receive_some(link, decoder, deadline, None)
        if received is None:
            return None
        deadline = received
    return reply


async def _receive_some(
    link: Link, decoder: MessageDecoder | ReplyDecoder, deadline: float, memory: Memory | None
) -> float | None:
    """Receive once; returns the deadline of the frame that has begun, None at the end of the stream."""
    if decoder.at_boundary:
        deadline = math.inf
        count = await link.receive_into(decoder.get_buffer())
    else:
        if deadline == math.inf:
            deadline = trio.current_time() + FRAME_SECS
        buffer, received = decoder.get_buffer(), None
        if buffer.nbytes <= AT_ONCE_BYTES and (memory is None or memory.cover()):
            received = link.receive_nowait(buffer)
        if received is None:
            received, deadline = await _receive_rest(link, buffer, deadline, memory)
        count = received
    if count == 0:
        decoder.receive_eof()
        return None
    decoder.buffer_updated(count)
    return deadline


async def _receive_rest(
    link: Link, buffer: memoryview, deadline: float, memory: Memory | None
) -> tuple[int, float]:
    """Receive inside a frame, by its deadline, which is moved by what we made the peer wait."""
    if memory is not None:
        before = trio.current_time()
        await memory.wait()
        deadline += trio.current_time() - before  # our own shortage is not the peer's delay
    with trio.CancelScope(deadline=deadline):
        return await link.receive_into(buffer), deadline
    raise LinkClosed(f"{link.peer} did not finish a frame within {FRAME_SECS:g} s")


def allocate(size: int) -> memoryview:
    """A writable buffer of ``size`` bytes whose content is not initialised."""
    return np.empty(size, np.uint8).data

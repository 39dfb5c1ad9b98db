"""Between a link and a decoder: receive exactly where the decoder wants the bytes."""

from __future__ import annotations

import numpy as np

from skippy.protocol import Message, MessageDecoder, Reply, ReplyDecoder

from .links import Link


async def receive_message(link: Link, decoder: MessageDecoder) -> Message | None:
    """The next whole message; None when the stream ended between frames.

    Raises RemoteProtocolError for bytes that break a rule or an end inside a frame, LinkClosed for a dead
    link.
    Cancellation loses nothing: bytes received so far stay in the decoder.
    """
    while (message := decoder.next_message()) is None:
        if not await _receive_some(link, decoder):
            return None
    return message


async def receive_reply(link: Link, decoder: ReplyDecoder) -> Reply | None:
    """The next whole reply; everything else as :func:`receive_message`."""
    while (reply := decoder.next_reply()) is None:
        if not await _receive_some(link, decoder):
            return None
    return reply


async def _receive_some(link: Link, decoder: MessageDecoder | ReplyDecoder) -> bool:
    count = await link.receive_into(decoder.get_buffer())
    if count == 0:
        decoder.receive_eof()
        return False
    decoder.buffer_updated(count)
    return True


def allocate(size: int) -> memoryview:
    """A writable buffer of ``size`` bytes whose content is not initialised."""
    return np.empty(size, np.uint8).data

"""What both decoders share: a fixed internal buffer, large fields received in place, and one way to fail.

The owner of the socket loops::

    while True:
        while (message := decoder.next_message()) is not None:
            ...                                      # every whole frame that has arrived
        view = decoder.get_buffer()
        count = await receive_into(view)
        if count == 0:
            decoder.receive_eof()                    # raises when that was mid-frame
            break
        decoder.buffer_updated(count)

``get_buffer`` is either the free part of the internal buffer or, once a large field's size is known, the
unfilled rest of that field itself. So at most one internal buffer's worth of a large field is ever copied.
"""

from __future__ import annotations

import abc
import struct
from collections import deque
from collections.abc import Callable, Generator
from typing import Final, Generic, TypeVar

from .errors import ErrorKind, LocalProtocolError, RemoteProtocolError
from .kinds import HEARTBEAT_BYTES, HEARTBEAT_MAGIC, MAX_PEER_TIMEOUT_MS, MIN_PEER_TIMEOUT_MS

INTERNAL_BUFFER_BYTES: Final = 16 * 1024
SMALL_BYTES: Final = 4 * 1024
"""Fields up to this size are parsed inside the internal buffer."""
_COMPACT_BELOW: Final = 4 * 1024
_FIRST_GROWTH_BYTES: Final = 256 * 1024
_U32: Final = struct.Struct("<I")

Allocate = Callable[[int], memoryview]
T = TypeVar("T")
Step = Generator[None, None, T]
"""A part of a parser: yields when it needs more bytes, returns its value."""


class Intake:
    """Received bytes on their way into fields. Only the decoders of this package use it."""

    __slots__ = ("_backlog", "_sink", "_sink_fill", "_view", "buffer", "end", "start")

    def __init__(self, size: int = INTERNAL_BUFFER_BYTES) -> None:
        self.buffer = bytearray(size)
        self._view = memoryview(self.buffer)
        self.start = 0
        self.end = 0
        self._sink: memoryview | None = None
        self._sink_fill = 0
        self._backlog: deque[memoryview] = deque()

    # --- the side that fills

    def writable(self) -> memoryview:
        """Where the next bytes belong. Empty only when the internal buffer is full of unparsed frames."""
        if self._sink is not None:
            return self._sink[self._sink_fill :]
        held = self.end - self.start
        if held == 0:
            self.start = self.end = 0
        elif self.start and len(self.buffer) - self.end < _COMPACT_BELOW:
            self.buffer[:held] = self.buffer[self.start : self.end]
            self.start, self.end = 0, held
        return self._view[self.end :]

    def written(self, count: int) -> None:
        if self._sink is not None:
            self._sink_fill += count
        else:
            self.end += count

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Queue bytes that did not come through ``writable``; ``pump`` moves them."""
        self._backlog.append(memoryview(bytes(data)))

    def pump(self) -> bool:
        """Move queued bytes where they belong. False when there was nothing to move."""
        if not self._backlog:
            return False
        chunk, view = self._backlog[0], self.writable()
        count = min(len(chunk), len(view))
        view[:count] = chunk[:count]
        self.written(count)
        if count == len(chunk):
            self._backlog.popleft()
        else:
            self._backlog[0] = chunk[count:]
        return True

    @property
    def backlogged(self) -> bool:
        return bool(self._backlog)

    @property
    def held(self) -> int:
        """Bytes received and not yet parsed into a field."""
        return self.end - self.start + sum(map(len, self._backlog))

    def take_rest(self) -> bytes:
        rest = bytes(self._view[self.start : self.end]) + b"".join(self._backlog)
        self.clear()
        return rest

    def clear(self) -> None:
        self.start = self.end = 0
        self._sink = None
        self._backlog.clear()

    # --- the side that parses

    def need(self, count: int) -> Step[int]:
        """Wait until ``count`` bytes (at most the buffer's size) are there; returns the offset of the first.

        The bytes are taken: the caller reads them at the returned offset before it waits again.
        """
        while self.end - self.start < count:
            yield
        offset = self.start
        self.start += count
        return offset

    def take(self, count: int) -> Step[bytes]:
        """Small fields: ``count`` bytes, at most the buffer's size."""
        offset = yield from self.need(count)
        return bytes(self._view[offset : offset + count])

    def into(self, target: memoryview) -> Step[None]:
        """Fill ``target``: what is here is copied, the rest is received in place."""
        have = min(len(target), self.end - self.start)
        target[:have] = self._view[self.start : self.start + have]
        self.start += have
        if have == len(target):
            return
        self._sink, self._sink_fill = target, have
        while self._sink_fill < len(target):
            yield
        self._sink = None

    def words(self, count: int) -> Step[tuple[int, ...]]:
        """``count`` i32."""
        layout, size = f"<{count}i", 4 * count
        if size <= SMALL_BYTES:
            return struct.unpack_from(layout, self.buffer, (yield from self.need(size)))
        return struct.unpack(layout, (yield from self.grown(size)))

    def grown(self, count: int) -> Step[memoryview]:
        """``count`` bytes in memory that grows as they arrive: at most about three times what has come."""
        data = bytearray(min(count, _FIRST_GROWTH_BYTES))
        filled = 0
        while True:
            yield from self.into(memoryview(data)[filled:])
            filled = len(data)
            if filled == count:
                return memoryview(data)
            larger = bytearray(min(count, 2 * filled))
            larger[:filled] = data
            data = larger


class Decoder(abc.ABC, Generic[T]):
    """Base of the two decoders. Frames come out in order; after an error nothing does.

    Args:
        heartbeats: they were agreed on this connection. They are taken out of the stream as they come, and
            are refused elsewhere.

    Attributes:
        bytes_received, frames_read: so far, those of heartbeats included.
        peer_timeout_ms: after how much silence the peer gives us up, as its last heartbeat said; None before
            the first.
    """

    def __init__(self, *, heartbeats: bool = False) -> None:
        self.bytes_received = 0
        self.frames_read = 0
        self.peer_timeout_ms: int | None = None
        self._heartbeats = heartbeats
        self._intake = Intake()
        self._between_frames = True
        self._error: Exception | None = None
        self._ready: deque[T] = deque()
        self._handed = 0
        self._parser = self._frames()

    @abc.abstractmethod
    def _frames(self) -> Generator[T | None, None, None]:
        """Yield a frame when one is whole, None when more bytes are needed."""

    @property
    def at_boundary(self) -> bool:
        """No byte of an unfinished frame has arrived, and none waits to be parsed."""
        return self._between_frames and not self._ready and self._intake.held == 0

    @property
    def unparsed(self) -> int:
        """Bytes received behind the frame that came out last, before another one is asked for."""
        return self._intake.held

    def get_buffer(self) -> memoryview:
        """Where the next received bytes belong; never empty. Valid until ``buffer_updated``.

        Raises:
            ProtocolError: the decoder is dead.
            LocalProtocolError: whole frames are waiting; take them first.
        """
        self._raise_if_dead()
        view = self._intake.writable()
        if not view or self._intake.backlogged:
            raise LocalProtocolError("the decoder is full of whole frames: take them before receiving more")
        self._handed = len(view)
        return view

    def buffer_updated(self, count: int) -> None:
        """``count`` bytes (at least 1) were put at the start of ``get_buffer()``."""
        self._raise_if_dead()
        if not 1 <= count <= self._handed:
            raise LocalProtocolError(
                f"{count} bytes were not received into get_buffer(); at 0 call receive_eof()"
            )
        self._handed = 0
        self.bytes_received += count
        self._intake.written(count)

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Feed any bytes (copied). The other way to the same end as get_buffer/buffer_updated."""
        self._raise_if_dead()
        if len(data):
            self.bytes_received += len(data)
            self._intake.feed(data)

    def passed(self, count: int) -> None:
        """A whole frame of ``count`` bytes was received elsewhere, between two frames of this decoder."""
        self.bytes_received += count
        self.frames_read += 1

    def receive_eof(self) -> None:
        """The stream ended: returns at a frame boundary. Whole frames can still be taken afterwards.

        Raises:
            RemoteProtocolError: (UnexpectedEof) inside a frame, and then for ever after; or the error of
                bytes that had not been looked at yet.
        """
        self._raise_if_dead()
        while (frame := self._parse()) is not None:
            self._ready.append(frame)
        if not (self._between_frames and self._intake.held == 0):
            self._fail(RemoteProtocolError("stream ended inside a frame", ErrorKind.UNEXPECTED_EOF))
            self._raise_if_dead()

    def take_trailing_data(self) -> bytes:
        """Hand over the bytes behind the last frame, when the stream goes on in another format.

        Raises:
            LocalProtocolError: inside a frame that has been read in part.
        """
        self._raise_if_dead()
        if not self._between_frames or self._ready:
            raise LocalProtocolError("only between frames can the rest of the stream be handed over")
        return self._intake.take_rest()

    def _next(self) -> T | None:
        if self._ready:
            return self._ready.popleft()
        self._raise_if_dead()
        return self._parse()

    def _parse(self) -> T | None:
        try:
            while True:
                frame = next(self._parser)
                if frame is not None:
                    self.frames_read += 1
                    return frame
                if not self._intake.pump():
                    return None
        except Exception as error:  # an allocator's error also leaves the stream position undefined
            self._fail(error)
            raise

    def _heartbeat_ahead(self, have: int) -> bool:
        """Whether the next frame, of which ``have`` bytes are here, is a heartbeat, where those may come."""
        intake = self._intake
        return (
            self._heartbeats
            and self._between_frames
            and have >= _U32.size
            and _U32.unpack_from(intake.buffer, intake.start)[0] == HEARTBEAT_MAGIC
        )

    def _heartbeat(self) -> Step[None]:
        """Take the heartbeat that is next."""
        offset = yield from self._intake.need(HEARTBEAT_BYTES)
        (timeout_ms,) = _U32.unpack_from(self._intake.buffer, offset + _U32.size)
        if not MIN_PEER_TIMEOUT_MS <= timeout_ms <= MAX_PEER_TIMEOUT_MS:
            raise RemoteProtocolError(
                f"a heartbeat with a peer timeout of {timeout_ms} ms; {MIN_PEER_TIMEOUT_MS} to "
                f"{MAX_PEER_TIMEOUT_MS} are allowed"
            )
        self.peer_timeout_ms = timeout_ms
        self.frames_read += 1

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._parser.close()
        self._intake.clear()

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise self._error


def decode_utf8(data: bytes | memoryview, what: str) -> str:
    """Strict UTF-8; RemoteProtocolError (InvalidData) naming ``what`` otherwise."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"{what} is not UTF-8 at byte {error.start}") from None

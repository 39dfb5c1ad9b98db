"""Direct prediction return: the last stage's tokens on a stream of their own, one per lane.

Stage 0 accepts such streams (:class:`ReturnHub`); the last stage dials them (:class:`ReturnStream`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import trio

from skippy.protocol import (
    AnnexedReplyDecoder,
    LocalProtocolError,
    Message,
    MessageDecoder,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    check_return_open,
    default_state,
    encode_annexed_reply,
    encode_message,
    encode_reply,
)

from .errors import LaneLost, StageError
from .framing import receive_reply, send_frame
from .links import Link, LinkClosed
from .reasons import failure_of
from .relay import Relay
from .writer import LinkWriter, Reservation

if TYPE_CHECKING:
    from .context import StageContext


class ReturnTarget(Protocol):
    """A lane of stage 0 that waits for predictions."""

    def deliver_prediction(self, reply: Reply, annex: ReplyAnnex | None) -> None:
        """Take the next owed prediction; raises RemoteProtocolError when none is owed."""

    @property
    def open_relay(self) -> Callable[[Link, ReplyDecoder], Relay[ReplyDecoder, Reply] | None]:
        """Lends the engine's thread the stream, where steps follow predictions by themselves."""

    def bind_return(self, opening: Message, scope: trio.CancelScope, *, plain: bool) -> None:
        """The lane's return stream is there; ``scope`` ends it."""

    def fail_return(self, failure: StageError) -> None:
        """The lane's return stream is gone: LaneLost, or the RequestFailed that the last stage gave."""


class ReturnHub:
    """Stage 0's meeting place of lanes that wait for a return stream and streams that arrive."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], ReturnTarget] = {}

    @property
    def waiting(self) -> int:
        """How many lanes wait for their stream."""
        return len(self._waiting)

    def expect(self, request_id: int, session_id: int, target: ReturnTarget) -> None:
        """From now on a stream opened with these ids belongs to ``target``."""
        if (request_id, session_id) in self._waiting:
            raise LocalProtocolError(f"request {request_id} already waits for a return stream")
        self._waiting[request_id, session_id] = target

    def forget(self, target: ReturnTarget) -> None:
        """``target`` waits no longer."""
        for key in [key for key, waiting in self._waiting.items() if waiting is target]:
            del self._waiting[key]

    async def serve(
        self,
        link: Link,
        decoder: MessageDecoder,
        opening: Message,
        watch: Callable[[ReplyDecoder], AbstractContextManager[object]],
        *,
        annexed: bool = False,
        heartbeats: bool = False,
        plain: bool = False,
    ) -> None:
        """Read replies from an accepted stream until it ends, or its lane does.

        ``watch`` is entered while they are read, and ``plain`` says that a plain generation-8 peer opened it.

        Raises RemoteProtocolError for an open that nobody waits for.
        """
        check_return_open(opening)
        target = self._waiting.pop((opening.request_id, opening.session_id), None)
        if target is None:
            raise RemoteProtocolError(
                f"{link.peer} opened a return stream for request {opening.request_id}, which waits for none"
            )
        annexes = AnnexedReplyDecoder(heartbeats=heartbeats) if annexed else None
        replies = annexes or ReplyDecoder(heartbeats=heartbeats)
        replies.receive_data(decoder.take_trailing_data())
        with trio.CancelScope() as scope:
            target.bind_return(opening, scope, plain=plain)
            try:
                with watch(replies):
                    while (reply := await _receive(link, replies, target)) is not None:
                        target.deliver_prediction(reply, None if annexes is None else annexes.annex)
                why = None if annexes is None else annexes.failure
                closed = LaneLost(f"{link.peer} closed the prediction return stream")
                target.fail_return(closed if why is None else failure_of(why))
            except (LinkClosed, RemoteProtocolError) as exc:
                target.fail_return(LaneLost(str(exc)))
                raise


async def _receive(link: Link, decoder: ReplyDecoder, target: ReturnTarget) -> Reply | None:
    """The next reply, or None, as :func:`receive_reply`, which the engine's thread does not take itself."""
    if (relay := target.open_relay(link, decoder)) is not None and (reply := await relay.run()) is not None:
        return reply
    return await receive_reply(link, decoder)


class ReturnStream:
    """The last stage's side of one lane's return stream.

    :meth:`write` and :meth:`watch` are its tasks; both raise when the stream ends.

    Args:
        annexed: the reply annex was agreed on this connection.
        heartbeats: and heartbeats.
        plain: stage 0 is a plain generation-8 peer, where a stream belongs to one request.
    """

    def __init__(
        self,
        context: StageContext,
        link: Link,
        *,
        annexed: bool = False,
        heartbeats: bool = False,
        plain: bool = False,
    ) -> None:
        self.annexed = annexed
        self.plain = plain
        self._link = link
        self._liveness = context.liveness
        self._heartbeats = heartbeats
        self._writer = LinkWriter(link)
        if heartbeats:
            self._writer.accept_secs = context.liveness.timeout_secs  # stage 0 only reads
        self._scope = trio.CancelScope()
        self._unused = True

    async def write(self) -> None:
        """Send what is queued, until :meth:`finish`."""
        with self._scope:
            await self._writer.run()

    async def finish(self) -> None:
        """Let ``write`` return, once all that is queued has left."""
        await self._writer.wait_flushed()
        self._scope.cancel()

    async def open(self, request_id: int, session_id: int) -> None:
        """Say whose stream this is. It is the first message and gets no reply."""
        kind = MessageKind.PREDICTION_RETURN_OPEN
        message = Message(kind, default_state(kind), request_id=request_id, session_id=session_id)
        await send_frame(self._link, encode_message(message), self._liveness.timeout_secs)

    async def send(self, reply: Reply, annex: ReplyAnnex | None = None) -> None:
        """Queue a reply, with an annex only where that was agreed; waits for room."""
        data = encode_reply(reply) if annex is None else encode_annexed_reply(reply, annex)
        self._unused = False
        await self._writer.wait_room()
        self._writer.put([data])

    async def tell(self, reason: bytes) -> None:
        """Send the reason of a failed request, where the annex was agreed; nothing may follow it.

        Waits until the system has taken it. Raises LinkClosed.
        """
        if self.annexed:
            await self._writer.wait_room()
            self._writer.put([reason])
            await self._writer.wait_flushed()

    def reserve(self) -> Reservation | None:
        """As :meth:`LinkWriter.reserve`."""
        self._unused = False
        return self._writer.reserve()

    async def watch(self) -> None:
        """Stage 0 sends nothing but heartbeats on this stream: anything else is its end."""
        agreed = self._heartbeats
        decoder = ReplyDecoder(heartbeats=agreed)
        with self._liveness.watch(self._link, decoder, self._writer, agreed=agreed):
            if await receive_reply(self._link, decoder) is not None:
                raise RemoteProtocolError(f"{self._link.peer} sent data on the prediction return stream")
        unknown = ", without a request that waits for it; is it the stage 0 that has asked?"
        raise LinkClosed(
            f"{self._link.peer} closed the prediction return stream{unknown if self._unused else ''}"
        )

    def close(self) -> None:
        self._link.close()

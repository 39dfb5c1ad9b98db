"""Where the last stage's predictions go: to stage 0 on a stream of the lane's own, else upstream."""

from __future__ import annotations

import contextlib

from skippy.protocol import ANNEX_EXTENSION, LIVENESS_EXTENSION, Message, Reply, ReplyAnnex

from .context import HANDSHAKE_SECS, StageContext
from .dialing import dial_admitted
from .errors import RequestFailed
from .interfaces import ReplySink, TaskStarter
from .links import LinkClosed
from .queues import PendingReply
from .reasons import encode_reason
from .returns import ReturnStream
from .writer import Reservation


class Answers:
    """The predictions of one lane on the last stage.

    Args:
        upstream: for a chain without a return stream.
        start: for the tasks of the return stream.
    """

    def __init__(self, context: StageContext, upstream: ReplySink, start: TaskStarter) -> None:
        self._context = context
        self._upstream = upstream
        self._start = start
        self._stream: ReturnStream | None = None
        self._reason: bytes | None = None

    async def open(self, message: Message) -> None:
        """Dial stage 0, unless this stage is all of the chain or has dialled already.

        A plain peer may end its stream whenever it has its last token, so nobody watches that one.

        Raises DownstreamUnavailable, LinkClosed.
        """
        context = self._context
        if context.return_endpoint is None or self._stream is not None:
            return
        link, agreed = await dial_admitted(
            context.transport,
            context.return_endpoint,
            token=context.token,
            source_host=context.source_host,
            timeout_secs=min(HANDSHAKE_SECS, context.options.peer_timeout_secs),
            request=context.admission.stage_zero,
            allow_plain=context.options.allow_plain_generation_8,
            retry=False,
        )
        extensions = agreed or ()
        stream = ReturnStream(
            context,
            link,
            annexed=ANNEX_EXTENSION in extensions,
            heartbeats=LIVENESS_EXTENSION in extensions,
            plain=(plain := agreed is None),
        )
        try:
            await stream.open(message.request_id, message.session_id)
        except BaseException:
            link.close()
            raise
        self._stream = stream
        if plain:
            self._start(stream.write, link.close)
        else:
            self._start(stream.write)
            self._start(stream.watch, link.close)

    async def release(self) -> None:
        """The request is over. So is its stream, towards a plain peer; others keep it for the next one."""
        if self._stream is not None and self._stream.plain:
            stream, self._stream = self._stream, None
            await stream.finish()

    @property
    def annexed(self) -> bool:
        """Whether an annex may go with a prediction."""
        return self._upstream.annexed if self._stream is None else self._stream.annexed

    @property
    def stay_here(self) -> bool:
        """Whether this stage is all of the chain, so that no stream is ever opened."""
        return self._context.return_endpoint is None

    async def send(self, reply: Reply, annex: ReplyAnnex | None = None) -> None:
        """Send a prediction, or what stands for one; waits for room."""
        if self._stream is not None:
            await self._stream.send(reply, annex)
        else:
            await self._upstream.put(PendingReply(reply, annex=annex))

    def reserve(self) -> Reservation | None:
        """As :meth:`LinkWriter.reserve`; None also without a return stream."""
        return None if self._stream is None else self._stream.reserve()

    def fail(self, request_id: int, failure: RequestFailed) -> None:
        """The lane has ended, because its request failed. Never waits; ``tell_why`` follows."""
        self._reason = encode_reason(request_id, failure)

    async def tell_why(self) -> None:
        """Send the reason on the return stream, where there is one; waits until the system has taken it."""
        if self._stream is not None and self._reason is not None:
            with contextlib.suppress(LinkClosed):
                await self._stream.tell(self._reason)

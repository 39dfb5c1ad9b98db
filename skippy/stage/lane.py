"""Executes the messages of one upstream lane on this stage and passes them on.

The same object serves a network peer (:mod:`skippy.stage.upstream`) and this process's own front end
(:mod:`skippy.frontend.lanes`): whoever holds it hands in messages and gets a place in a reply stream for each
reply that is owed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from skippy.protocol import (
    ANNEX_EXTENSION,
    Lane as LaneMachine,
    Message,
    MessageKind,
    ProtocolError,
    RemoteProtocolError,
    Reply,
    ReplyStats,
    UpstreamConnection,
    encode_frame,
    requires_predicted_reply,
)
from skippy.telemetry import Level, names

from .context import HANDSHAKE_SECS, MESSAGE_SECS, REASON_SECS, StageContext
from .dialing import dial_admitted, dial_stage
from .downstream import Downstream
from .errors import DownstreamUnavailable, LaneLost, RequestFailed, StageError
from .express import Express, prediction_frame
from .framing import allocate
from .intake import DATA, RESTORES, check_data
from .links import LinkClosed
from .predictions import Predictions
from .queues import PendingReply
from .returns import ReturnStream
from .session import StageSession


class ReplySink(Protocol):
    """Where a lane's owed replies go, in order."""

    async def put(self, reply: PendingReply) -> None: ...


class Lane:
    """One lane through this stage.

    :meth:`run` is its life and belongs to a nursery; :meth:`handle` is called by one task at a time. When
    anything about the lane fails, everyone who waits on it gets the same LaneLost or RequestFailed.
    """

    def __init__(self, context: StageContext, replies: ReplySink) -> None:
        self.number = context.connection_numbers()
        self._context = context
        self._replies = replies
        self.machine = LaneMachine(max(1, context.reply_credit))
        """What the lane is to whoever leases it; its credit window is this stage's window downstream."""
        self._machine = UpstreamConnection()
        self._session: StageSession | None = None
        self._downstream: Downstream | None = None
        self._return: ReturnStream | None = None
        self.predictions = Predictions(context.hub, self._lose)
        """What stage 0 is owed on this lane; unused on other stages."""
        self._owed: deque[PendingReply] = deque()
        self._failure: StageError | None = None
        self._loss: LaneLost | None = None
        self._ended = trio.Event()
        self._patience = trio.CancelScope()
        self._scopes: set[trio.CancelScope] = set()
        self._nursery: trio.Nursery | None = None

    # -- life ------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect downstream, report started, then live until the lane fails, is closed, or is cancelled.

        Raises DownstreamUnavailable before it has started. Afterwards failures are the lane's, not raised.
        On leaving, on every path, the session is dropped and all links of the lane are closed.
        """
        try:
            self._downstream = downstream = await self._dial_downstream()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if downstream is not None:
                    nursery.start_soon(self._guard, downstream.write)
                    nursery.start_soon(self._guard, downstream.read, downstream.close)
                task_status.started()
                with self._patience:
                    await self._ended.wait()
                if self._loss is not None:
                    self.fail(self._loss)
                nursery.cancel_scope.cancel()
        finally:
            self.fail(LaneLost("the lane is closed"))
            if self._drop_session():
                self._context.telemetry.emit(names.STAGE_BINARY_SESSION_ORPHAN_RECLAIMED, lane=self.number)

    async def _dial_downstream(self) -> Downstream | None:
        context = self._context
        if context.downstream is None:
            return None
        link, extensions = await dial_admitted(
            context.downstream_transport,
            context.downstream,
            token=context.token,
            source_host=context.source_host,
            timeout_secs=context.options.downstream_connect_timeout_secs,
            request=context.admission.downstream,
            allow_plain=context.options.allow_plain_generation_8,
        )
        return Downstream(context, link, self.machine.credit, annexed=ANNEX_EXTENSION in extensions)

    async def _guard(
        self, task: Callable[[], Awaitable[None]], close: Callable[[], None] = lambda: None
    ) -> None:
        """Run one of the lane's tasks; its end is the lane's end."""
        try:
            await task()
        except LinkClosed as exc:
            self._lose(str(exc))
        except (ProtocolError, OSError) as exc:
            self.fail(LaneLost(str(exc)))
        except StageError as exc:
            self.fail(exc)
        finally:
            close()

    def _lose(self, reason: str) -> None:
        """A link is broken for sending, or the return stream is gone: the lane takes no more messages.

        It ends after REASON_SECS, in which a reason that the stage below has sent may still be read, or at
        once where none can come. Never waits.
        """
        if self._downstream is None or not self._downstream.annexed:
            self.fail(LaneLost(reason))
        elif self._loss is None:
            self._loss = LaneLost(reason)
            self.machine.fail()
            self._patience.deadline = trio.current_time() + REASON_SECS

    @property
    def failure(self) -> StageError | None:
        """Why the lane has ended, or is about to; None while it is fit for use."""
        return self._failure or self._loss

    def fail(self, failure: StageError) -> None:
        """End the lane; the first failure stays. Never waits."""
        if self._failure is not None:
            return
        self._failure = failure
        self.machine.fail()
        self.machine.retire()
        self._machine.close()
        self._ended.set()
        for reply in self._owed:
            reply.fail(failure)
        self._owed.clear()
        self.predictions.fail(failure)
        for scope in self._scopes:
            scope.cancel()

    def check_alive(self) -> None:
        """Raise ``failure`` if there is one: after any wait there may be, whatever was waited for."""
        if self.failure is not None:
            raise self.failure

    async def _check_verdict(self) -> None:
        """As ``check_alive``, once it is certain why the lane ends."""
        if self._loss is not None:
            await self._ended.wait()
        self.check_alive()

    def close(self) -> None:
        """End the lane in good order. Never waits."""
        self.fail(LaneLost("the lane is closed"))

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def wait_settled(self) -> None:
        """Wait until every acknowledgement and prediction owed so far has come.

        Raises the lane's failure, or waits for ever, when the lane ends first: watch ``wait_ended`` too.
        """
        if self._downstream is not None:
            await self._downstream.wait_drained()
        for place in [*self._owed, *self.predictions.places]:
            await place.wait()
        await self._check_verdict()

    # -- messages --------------------------------------------------------------------------------------

    async def handle(self, message: Message) -> None:
        """Execute one message, within MESSAGE_SECS; replies owed for it go to the sink.

        Cancellation: the message may have run here and not further down; only ``Stop`` makes sense then.

        Raises:
            LaneLost, RequestFailed: the lane has ended, now or before, and why.
        """
        await self._check_verdict()
        with trio.move_on_after(MESSAGE_SECS) as scope:
            self._scopes.add(scope)
            try:
                self._machine.receive(message)
                with self._context.telemetry.span(
                    names.STAGE_BINARY_MESSAGE_TIMING, lane=self.number, message_kind=message.kind.name
                ):
                    await self._dispatch(message)
            except LinkClosed as exc:
                self._lose(str(exc))
            except ProtocolError as exc:
                self.fail(LaneLost(str(exc)))
            except (RequestFailed, DownstreamUnavailable) as exc:
                self.fail(exc)
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            self.fail(LaneLost(f"{message.kind.name} was not carried out within {MESSAGE_SECS:g} s"))
        await self._check_verdict()

    async def _dispatch(self, message: Message) -> None:
        kind = message.kind
        if kind in DATA:
            await self._run_data(message)
        elif kind is MessageKind.CONFIGURE_GENERATION:
            await self._configure(message)
        elif kind is MessageKind.STOP:
            await self._stop(message)
        elif kind is MessageKind.TRIM_SESSION:
            await self._trim(message)
        elif kind in RESTORES:
            # There is no prefix cache yet, so every question about one is a miss, asked of nobody else.
            await self._owe(Reply.ack(ReplyStats(kv_lookup_misses=1)))
        else:
            raise RemoteProtocolError(f"message kind {kind.name} is not supported by this stage")

    async def _run_data(self, message: Message) -> None:
        context = self._context
        check_data(message, context.stage_index, context.info.max_batch)
        if message.kind is MessageKind.PREFILL_EMBD:
            await self._owe(Reply.ack())
        session = await self._ensure_session()
        downstream = self._downstream
        output = allocate(message.token_count * context.info.output_width * 4) if downstream else None
        compute = await session.prepare(message, output)
        frame = message if output is None else message.forwarded(context.stage_index, output)
        place = PendingReply() if self._keeps_place(frame) else None
        express = self._express(frame, place)
        with context.telemetry.span(
            names.STAGE_BINARY_LLAMA_DECODE,
            request_id=message.request_id,
            message_kind=message.kind.name,
            token_count=message.token_count,
            pos_start=message.pos_start,
        ):
            if express is not None:
                await session.run(express.call(compute), express.finish)
            else:
                token = await session.run(compute)
        if express is None and downstream is not None:
            await self._forward(downstream, frame, place)
        elif express is None:
            await self._answer(message, token)
        if place is not None:
            await self._replies.put(place)

    def _keeps_place(self, frame: Message) -> bool:
        """Predictions come back to stage 0 of a longer chain, so there a place is kept for each."""
        if self._downstream is None or self._context.stage_index or not requires_predicted_reply(frame.kind):
            return False
        self.predictions.check_awaited(frame.kind)
        return True

    def _express(self, frame: Message, place: PendingReply | None) -> Express | None:
        """The short way out for a decode frame, where there is one now. See :mod:`skippy.stage.express`."""
        if not requires_predicted_reply(frame.kind):
            return None
        if self._downstream is not None:
            reservation = self._downstream.reserve()
            if reservation is None:
                return None
            # The header only refers to the activation, which the engine is about to compute.
            buffers = encode_frame(frame, self._context.info.output_width)
            if place is not None:
                self.predictions.keep(frame.kind, place)
            return Express(reservation, lambda _: buffers, self._fail_for)
        reservation = self._return.reserve() if self._return is not None else None
        return None if reservation is None else Express(reservation, prediction_frame, self._fail_for)

    def _fail_for(self, error: Exception) -> None:
        """End the lane for what went wrong on the engine's thread."""
        if isinstance(error, LinkClosed):
            self._lose(str(error))
        else:
            self.fail(RequestFailed(str(error)))

    async def _answer(self, message: Message, token: int | None) -> None:
        """The last stage's reply to a data message, where it owes one."""
        if token is not None:
            await self._predict(Reply.predicted_token(token))
        elif message.kind is MessageKind.DECODE_REPLAY_EMBD:
            await self._owe(Reply.ack())

    async def _forward(self, downstream: Downstream, frame: Message, place: PendingReply | None) -> None:
        """Send a data message on, the ordinary way."""
        if frame.kind is MessageKind.PREFILL_EMBD:
            await downstream.send(frame, credit=True, on_ack=lambda _: None)
        elif frame.kind is MessageKind.DECODE_REPLAY_EMBD:
            await self._request(downstream, frame)
        elif place is not None:
            await downstream.send(frame, on_queued=lambda: self.predictions.keep(frame.kind, place))
        else:
            await downstream.send(frame)

    async def _configure(self, message: Message) -> None:
        context = self._context
        session = await self._ensure_session()
        if context.info.is_last:
            await session.configure(message.sampling, message.chat_sampling_metadata)
            if context.return_endpoint is not None and self._return is None:
                await self._open_return(message)
        if self._downstream is None:
            await self._owe(Reply.ack())
            return
        if context.stage_index == 0:
            self.predictions.await_stream(message.request_id, message.session_id)
        await self._request(self._downstream, message)

    async def _stop(self, message: Message) -> None:
        self._drop_session()
        self._context.telemetry.emit(
            names.STAGE_BINARY_SESSION_STOP, level=Level.DEBUG, request_id=message.request_id
        )
        if self._downstream is None:
            self._machine.stopped()
            await self._owe(Reply.ack())
            return
        await self.wait_settled()
        await self.predictions.release()
        await self._request(self._downstream, message, then=self._machine.stopped)

    async def _trim(self, message: Message) -> None:
        if self._session is not None:
            await self._session.trim(message)
        if self._downstream is None:
            await self._owe(Reply.ack())
            return
        await self._request(self._downstream, message)

    async def _request(
        self, downstream: Downstream, message: Message, then: Callable[[], None] = lambda: None
    ) -> None:
        """Send a message on whose acknowledgement, with its statistics, becomes ours."""
        place = PendingReply()

        def on_ack(reply: Reply) -> None:
            if self._failure is not None:
                return  # it arrived as the lane ended, which has failed the place
            self._owed.remove(place)
            then()
            place.set(Reply.ack(reply.stats))

        await downstream.send(message, on_ack=on_ack, on_queued=lambda: self._owed.append(place))
        await self._replies.put(place)

    async def _owe(self, reply: Reply) -> None:
        await self._replies.put(PendingReply(reply))

    # -- sessions --------------------------------------------------------------------------------------

    async def _ensure_session(self) -> StageSession:
        if self._session is None:
            self._session = await StageSession.open(self._context.scheduler)
        return self._session

    def _drop_session(self) -> bool:
        """Give the session's sequence back; False when there was none. Never waits."""
        if self._session is None:
            return False
        self._session.close()
        self._session = None
        return True

    # -- predictions -----------------------------------------------------------------------------------

    async def _predict(self, reply: Reply) -> None:
        """The last stage's prediction: on the return stream if there is one, else upstream."""
        if self._return is not None:
            await self._return.send(reply)
        else:
            await self._owe(reply)

    async def _open_return(self, message: Message) -> None:
        context = self._context
        assert context.return_endpoint is not None
        assert self._nursery is not None
        link = await dial_stage(
            context.transport,
            context.return_endpoint,
            token=context.token,
            source_host=context.source_host,
            timeout_secs=HANDSHAKE_SECS,
            request=context.admission.stage_zero,
            allow_plain=context.options.allow_plain_generation_8,
            retry=False,
        )
        stream = ReturnStream(context, link)
        try:
            await stream.open(message.request_id, message.session_id)
        except BaseException:
            link.close()
            raise
        self._return = stream
        self._nursery.start_soon(self._guard, stream.write)
        self._nursery.start_soon(self._guard, stream.watch, link.close)

"""One lane through a stage: its links, its life, and its end.

The same object serves a network peer (:mod:`skippy.stage.upstream`) and this process's own front end
(:mod:`skippy.frontend.lanes`): whoever holds it hands in messages and gets a place in a reply stream for each
reply that is owed. What is done with a message is in :mod:`skippy.stage.execution`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from skippy.engine import EngineError
from skippy.engine.grammar import GrammarFailed
from skippy.protocol import (
    ANNEX_EXTENSION,
    LIVENESS_EXTENSION,
    RESTORE_EXTENSION,
    WAVES_EXTENSION,
    Lane as LaneMachine,
    LaneState,
    Message,
    MessageDecoder,
    ProtocolError,
    UpstreamState,
)
from skippy.telemetry import names

from .context import LAST_WORDS_SECS, MESSAGE_SECS, REASON_SECS, StageContext, log
from .downstream import Downstream
from .errors import LaneLost, RequestFailed, SettingsRefused, StageError
from .execution import Execution
from .interfaces import ReplySink
from .lending import lend_steps
from .links import Link, LinkClosed
from .memory import FrameMemory
from .queues import PendingReply
from .relay import Relay
from .runs import LocalRun

_ENDS = (ProtocolError, LinkClosed, StageError)
"""What ends a lane, in good order, while it handles a message."""


class Lane:
    """One lane through this stage.

    :meth:`run` is its life and belongs to a nursery; :meth:`handle` is called by one task at a time. When
    anything about the lane fails, everyone who waits on it gets the same LaneLost or RequestFailed.
    """

    def __init__(self, context: StageContext, replies: ReplySink) -> None:
        self.number = context.connection_numbers()
        self._context = context
        self.machine = LaneMachine(max(1, context.reply_credit))
        """What the lane is to whoever leases it; its credit window is this stage's window downstream."""
        self._execution = Execution(context, replies, self)
        self.stats = self._execution.stats
        self.predictions = self._execution.predictions
        """What stage 0 is owed on this lane; unused on other stages."""
        self._downstream: Downstream | None = None
        self._failure: StageError | None = None
        self._loss: StageError | None = None
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
        self._context.lanes.add(self)
        try:
            self._downstream = self._execution.downstream = downstream = await self._dial_downstream()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if downstream is not None:
                    if self._context.stage_index == 0:
                        self.start(self.predictions.watch)
                    self.start(downstream.write)
                    self.start(downstream.read, downstream.close)
                task_status.started()
                with self._patience:
                    await self._ended.wait()
                self.fail(self._loss or LaneLost("the lane is closed"))
                self._drop_session()
                with trio.move_on_after(LAST_WORDS_SECS):
                    await self._execution.tell_why()
                nursery.cancel_scope.cancel()
        finally:
            self.fail(LaneLost("the lane is closed"))
            self._drop_session()
            self._context.lanes.discard(self)

    def _drop_session(self) -> None:
        if self._execution.drop_session():
            self._context.telemetry.emit(names.STAGE_BINARY_SESSION_ORPHAN_RECLAIMED, lane=self.number)

    async def _dial_downstream(self) -> Downstream | None:
        context = self._context
        if context.downstream is None:
            return None
        link, agreed = await context.warm.take() or await context.dial_downstream(
            watch=context.downstream_watch
        )
        if agreed is None:
            self.meet_plain_peer()
        extensions = agreed or ()
        return Downstream(
            context,
            link,
            self.machine.credit,
            annexed=ANNEX_EXTENSION in extensions,
            waves=WAVES_EXTENSION in extensions,
            restores=RESTORE_EXTENSION in extensions,
            heartbeats=LIVENESS_EXTENSION in extensions,
        )

    def meet_plain_peer(self) -> None:
        """A neighbour on this lane is a plain generation-8 peer."""
        self._execution.plain = True

    def meet_whole_restores(self) -> None:
        """The upstream peer takes all of a cached prefix, or nothing."""
        self._execution.whole = True

    def meet_waves(self) -> None:
        """The upstream peer agreed to decode waves."""
        self._execution.waves = True

    def start(self, task: Callable[[], Awaitable[None]], close: Callable[[], None] = lambda: None) -> None:
        """Run a task whose end is the lane's end, and ``close`` after it. Only while the lane lives."""
        assert self._nursery is not None
        self._nursery.start_soon(self._guard, task, close)

    async def _guard(self, task: Callable[[], Awaitable[None]], close: Callable[[], None]) -> None:
        """Run one of the lane's tasks; its end is the lane's end."""
        try:
            await task()
        except LinkClosed as exc:
            self.lose(LaneLost(str(exc)))
        except (ProtocolError, OSError) as exc:
            self.fail(LaneLost(str(exc)))
        except StageError as exc:
            self.fail(exc)
        finally:
            close()

    def lose(self, failure: StageError) -> None:
        """A link is broken for sending, or the return stream is gone: the lane takes no more messages.

        It ends after REASON_SECS, in which a reason that the stage below has sent may still be read, or at
        once where none can come, or ``failure`` is that reason. Never waits.
        """
        if isinstance(failure, RequestFailed) or self._downstream is None or not self._downstream.annexed:
            self.fail(failure)
        elif self._loss is None:
            self._loss = failure
            self.machine.fail()
            self._patience.deadline = trio.current_time() + REASON_SECS

    def fail_for(self, error: Exception) -> None:
        """End the lane for what went wrong in a message, on the engine's thread too. Never waits."""
        if isinstance(error, LinkClosed):
            self.lose(LaneLost(str(error)))
        elif isinstance(error, ProtocolError):
            self.fail(LaneLost(str(error)))
        elif isinstance(error, StageError):
            self.fail(error)
        elif isinstance(error, GrammarFailed):
            self.fail(SettingsRefused(str(error)))
        else:
            if not isinstance(error, (EngineError, ValueError)):
                log.error("a decode failed by a fault of this program", lane=self.number, exc_info=error)
            self.fail(RequestFailed(str(error)))

    @property
    def state(self) -> LaneState | UpstreamState:
        """Stage 0: what the lane is to whoever leases it; elsewhere: how far its request has come."""
        return self.machine.state if self._context.stage_index == 0 else self._execution.state

    @property
    def failure(self) -> StageError | None:
        """Why the lane has ended, or is about to; None while it is fit for use."""
        return self._failure or self._loss

    def fail(self, failure: StageError) -> None:
        """End the lane; the first failure stays. Never waits."""
        if self._failure is not None:
            return
        self._failure = failure
        if self._nursery is not None and isinstance(failure, RequestFailed):
            # Whoever serves the lane gives up with it; the last words still need the return stream's writer.
            self._nursery.cancel_scope.shield = True
        self.machine.fail()
        self.machine.retire()
        self._ended.set()
        self._execution.end(failure)
        for scope in self._scopes:
            scope.cancel()

    @property
    def owes(self) -> bool:
        """Whether an acknowledgement or a prediction is still to come: then it is nobody else's yet."""
        return self._execution.owes

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
        await self._execution.wait_settled()
        await self._check_verdict()

    # -- messages --------------------------------------------------------------------------------------

    async def handle(self, message: Message) -> None:
        """Execute one message, within MESSAGE_SECS; replies owed for it go to the sink.

        A decode frame may still be with the engine when this returns, and so is what it refers to until the
        next call returns.

        Cancellation: the message may have run here and not further down; only ``Stop`` makes sense then.

        Raises:
            LaneLost, RequestFailed: the lane has ended, now or before, and why.
        """
        if self.handle_now(message):
            return
        await self._check_verdict()
        with trio.move_on_after(MESSAGE_SECS) as scope:
            self._scopes.add(scope)
            try:
                stale = self._execution.receive(message)
                with self._context.telemetry.span(
                    names.STAGE_BINARY_MESSAGE_TIMING, lane=self.number, message_kind=message.kind.name
                ) as span:
                    if stale:
                        span["stale"] = True
                    await self._execution.carry_out(message)
            except _ENDS as exc:
                self.fail_for(exc)
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            self.fail(LaneLost(f"{message.kind.name} was not carried out within {MESSAGE_SECS:g} s"))
        await self._check_verdict()

    def handle_now(self, message: Message) -> bool:
        """Do what :meth:`handle` does, if it is a decode frame that nothing has to be waited for.

        False: it is not, or the lane has ended, perhaps just now; :meth:`handle` will tell.
        """
        # What has become of the frame before may have ended the lane, which this is the first to hear of.
        if not self._execution.settle() or self.failure is not None:
            return False
        try:
            return self._execution.start_decode(message)
        except _ENDS as exc:
            self.fail_for(exc)
            return False

    def open_relay(
        self, link: Link, decoder: MessageDecoder, memory: FrameMemory
    ) -> Relay[MessageDecoder, Message] | None:
        """Let the engine's thread take the decode steps that follow, if the last message was one.

        None where it cannot; else run what is returned before receiving anything. Only while no message is
        being handled.
        """
        return None if self.failure is not None else lend_steps(self._execution, link, decoder, memory)

    def pause(self) -> None:
        """The request does not decode on for now: batches must not wait for its next step. Never waits."""
        self._execution.pause()

    @property
    def is_whole_chain(self) -> bool:
        """Whether this stage is all of the chain, where steps may follow each other by themselves."""
        return self._context.info.is_first and self._context.info.is_last

    def start_run(self, message: Message, run: LocalRun) -> PendingReply | None:
        """Begin decode steps that follow each other by themselves, if this stage is all of the chain.

        Returns the place of the run's end, which fails if the lane does; None where ``handle_now`` or
        ``handle`` must carry out the step alone. Never waits.
        """
        if not self._execution.settle() or self.failure is not None:
            return None
        try:
            return self._execution.start_run(message, run)
        except _ENDS as exc:
            self.fail_for(exc)
            return None

    def went_on(self) -> None:
        """A step of the run has begun by itself: call it for each."""
        self._execution.went_on()

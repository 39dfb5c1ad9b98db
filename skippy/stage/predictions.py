"""Stage 0's side of one lane's predictions: which are owed, and the return stream that brings them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import trio

from skippy.protocol import (
    Message,
    MessageKind,
    PredictionReturn,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    ReplyKind,
    VerifyPipeline,
)
from skippy.protocol.kinds import LLAMA_TOKEN_NULL

from .errors import LaneLost, StageError
from .links import Link
from .queues import PendingReply
from .relay import Relay
from .returns import ReturnHub
from .runs import ChainRun

PREDICTION_SECS = 300.0
"""Longest wait for a prediction: far above a slow prefill, below what HTTP clients wait."""


class Predictions:
    """Places for owed predictions, filled in order. The :class:`ReturnTarget` of its lane.

    Args:
        vocab_size: what the last stage predicts is below it.
        windows: the lane's verify windows, which their predictions resolve.
        on_lost: told why, when the return stream ends.
        open_relay: lends the engine's thread the return stream, before each receive.
    """

    def __init__(
        self,
        hub: ReturnHub,
        vocab_size: int,
        windows: VerifyPipeline,
        on_lost: Callable[[StageError], None],
        open_relay: Callable[[Link, ReplyDecoder], Relay[ReplyDecoder, Reply] | None] = lambda *_: None,
    ) -> None:
        self._hub = hub
        self._vocab_size = vocab_size
        self._windows = windows
        self._on_lost = on_lost
        self.open_relay = open_relay
        self._stream: PredictionReturn | None = None
        self._opened = trio.Event()
        self._scope: trio.CancelScope | None = None
        self._plain = False
        self._places: deque[PendingReply] = deque()
        self._moved = -math.inf
        """When a prediction last came, or was first owed."""
        self._watched = False
        self._unwatched = trio.lowlevel.ParkingLot()

    @property
    def places(self) -> tuple[PendingReply, ...]:
        """What is owed now, oldest first."""
        return tuple(self._places)

    @property
    def run_to_come(self) -> Callable[[], ChainRun | None] | None:
        """What may follow by itself the one prediction that is owed."""
        return self._places[0].open_run if len(self._places) == 1 else None

    def await_stream(self, request_id: int, session_id: int) -> None:
        """Let the lane's return stream serve this request: an open one at once, else the one to come."""
        if self._stream is None:
            self._stream = PredictionReturn(request_id, session_id)
            self._hub.expect(request_id, session_id, self)
        elif self._stream.bound != (request_id, session_id):
            self._stream.bind(request_id, session_id)

    def check_awaited(self, kind: MessageKind) -> None:
        """RemoteProtocolError when no stream was made ready for a frame that asks for a prediction."""
        if self._stream is None or self._stream.bound is None:
            raise RemoteProtocolError(f"{kind.name} before ConfigureGeneration")

    def keep(self, kind: MessageKind, place: PendingReply) -> None:
        """A frame of ``kind`` is on its way down; its prediction goes to ``place``."""
        assert self._stream is not None
        self._stream.expect(kind)
        if not self._places:
            self._moved = trio.current_time()
        self._places.append(place)
        if not self._watched:
            self._unwatched.unpark()

    async def watch(self) -> None:
        """Raise LaneLost once PREDICTION_SECS have passed in which predictions were owed and none came.

        One timer serves all tokens: setting one for each would cost more than their bookkeeping.
        """
        while True:
            while not self._places:
                self._watched = False
                await self._unwatched.park()
            self._watched = True
            due = self._moved + PREDICTION_SECS
            if due <= trio.current_time():
                raise LaneLost(f"no prediction within {PREDICTION_SECS:g} s")
            await trio.sleep_until(due)

    async def release(self) -> None:
        """The request has ended with nothing owed; waits for a stream that is still to come.

        The stream stays for the next request, unless a plain peer opened it: those open one for each.
        """
        if self._stream is not None and self._stream.bound is not None:
            await self._opened.wait()
            self._stream.release()
            if self._plain:
                self._end_stream()
                self._stream, self._opened = None, trio.Event()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._scope is not None:
            self._scope.cancel()

    def fail(self, failure: StageError) -> None:
        """The lane has ended, and with it its stream. Never waits."""
        for place in self._places:
            place.fail(failure)
        self._places.clear()
        self._end_stream()
        self._hub.forget(self)

    # -- as ReturnTarget -------------------------------------------------------------------------------

    def bind_return(self, opening: Message, scope: trio.CancelScope, *, plain: bool = False) -> None:
        assert self._stream is not None
        self._stream.opened(opening)
        self._scope = scope
        self._plain = plain
        self._opened.set()

    def is_token(self, reply: Reply) -> bool:
        """Whether it is one token that the model has: nothing else can be followed by a step."""
        return reply.kind is ReplyKind.PREDICTED_TOKEN and 0 <= reply.predicted < self._vocab_size

    def go_on(self, reply: Reply, kind: MessageKind) -> None:
        """In the engine's thread: the prediction has come, and a frame of ``kind`` asks for the next one.

        Its place stays: it is for the first that is not followed so. Raises RemoteProtocolError.
        """
        assert self._stream is not None
        self._stream.receive(reply)
        self._stream.expect(kind)

    def moved(self) -> None:
        """A prediction has come, with another one owed."""
        self._moved = trio.current_time()

    def deliver_prediction(self, reply: Reply, annex: ReplyAnnex | None = None) -> None:
        assert self._stream is not None
        kind = self._stream.receive(reply)
        self._check_tokens(reply, annex)
        if kind is MessageKind.VERIFY_WINDOW:
            self._windows.resolve(reply.window_id, len(reply.predicted_tokens))
        self._moved = trio.current_time()
        self._places.popleft().set(reply, annex)

    def _check_tokens(self, reply: Reply, annex: ReplyAnnex | None) -> None:
        """RemoteProtocolError for a token that the model does not have; -1 answers a stale frame."""
        tokens = [reply.predicted] if reply.predicted != LLAMA_TOKEN_NULL else []
        tokens += reply.predicted_tokens
        if annex is not None:
            tokens += [entry.token for position in annex.log_probabilities for entry in position.top]
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise RemoteProtocolError(
                    f"{reply.kind.name} with token {token}; the model's are 0 to {self._vocab_size - 1}"
                )

    def fail_return(self, failure: StageError) -> None:
        self._on_lost(failure)

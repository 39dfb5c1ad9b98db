"""The machines: small classes that hold a current state and counters. No I/O, no clock, no locks.

Every class is driven by its owner: call the method of what happened *before* acting on it. A call that does
not fit raises and changes nothing. :class:`LocalProtocolError` means our own caller is wrong,
:class:`RemoteProtocolError` that the peer is; after the latter close the connection. The tables are in
:mod:`skippy.protocol.states`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from .errors import ErrorKind, LocalProtocolError, RemoteProtocolError
from .kinds import MessageKind
from .messages import Message, Reply
from .rules import DATA_KINDS, reply_kinds, state_matches_kind
from .states import (
    LANE,
    RETURN,
    UPSTREAM,
    LaneEvent,
    LaneState,
    ReturnEvent,
    ReturnState,
    UpstreamEvent,
    UpstreamState,
)

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class Machine(Generic[S, E]):
    """A current state and a transition table."""

    def __init__(self, name: str, table: Mapping[S, Mapping[E, S]], start: S) -> None:
        self._name = name
        self._table = table
        self._state = start

    @property
    def state(self) -> S:
        return self._state

    def _check(self, event: E, error: type[LocalProtocolError | RemoteProtocolError]) -> S:
        """The state that ``event`` leads to; raises ``error`` when the table has no such pair."""
        try:
            return self._table[self._state][event]
        except KeyError:
            raise error(f"{self._name} is {self._state.value}: {event.value} does not fit") from None

    def _local(self, event: E) -> None:
        self._state = self._check(event, LocalProtocolError)

    def _remote(self, event: E) -> None:
        self._state = self._check(event, RemoteProtocolError)


class CreditWindow:
    """How many acknowledgements a peer may owe us: one credit per frame sent, returned by its Ack.

    Attributes:
        limit: frames that may be unacknowledged at once, at least 1.
        outstanding: frames sent and not yet acknowledged.
    """

    __slots__ = ("limit", "outstanding")

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise LocalProtocolError(f"a credit window needs a limit of at least 1, not {limit}")
        self.limit = limit
        self.outstanding = 0

    @classmethod
    def open(cls, limit: int) -> CreditWindow:
        """A window of ``limit`` credits, all of them free."""
        return cls(limit)

    @property
    def available(self) -> int:
        """Frames that may be sent now."""
        return self.limit - self.outstanding

    @property
    def drained(self) -> bool:
        """Nothing is outstanding."""
        return self.outstanding == 0

    def send(self) -> None:
        """One frame is about to be sent. LocalProtocolError without credit: read an Ack first."""
        if self.outstanding >= self.limit:
            raise LocalProtocolError(
                f"no credit: {self.outstanding} of {self.limit} frames are unacknowledged"
            )
        self.outstanding += 1

    def ack(self) -> None:
        """One Ack was read. RemoteProtocolError when none was owed."""
        if self.outstanding == 0:
            raise RemoteProtocolError("Ack without a frame that asks for one")
        self.outstanding -= 1


_UPSTREAM_EVENTS: Final = {
    MessageKind.PREFILL_EMBD: UpstreamEvent.PREFILL,
    MessageKind.PREFILL_FINAL_EMBD: UpstreamEvent.PREFILL_FINAL,
    MessageKind.CONFIGURE_GENERATION: UpstreamEvent.CONFIGURE,
    MessageKind.DECODE_EMBD: UpstreamEvent.DECODE,
    MessageKind.DECODE_READOUT: UpstreamEvent.DECODE,
    MessageKind.DECODE_LIGHT_CTX: UpstreamEvent.DECODE,
    MessageKind.VERIFY_WINDOW: UpstreamEvent.DECODE,
    MessageKind.DECODE_REPLAY_EMBD: UpstreamEvent.REPLAY,
    MessageKind.DECODE_REPLAY_FINAL_EMBD: UpstreamEvent.REPLAY_FINAL,
    MessageKind.PROBE_PREFILL: UpstreamEvent.PROBE,
    MessageKind.RESTORE_PREFILL: UpstreamEvent.RESTORE,
    MessageKind.TRY_RESTORE_PREFILL: UpstreamEvent.RESTORE,
    MessageKind.TRY_RESTORE_PREFILL_DECODE: UpstreamEvent.RESTORE_DECODE,
    MessageKind.TRIM_SESSION: UpstreamEvent.TRIM,
    MessageKind.RETIRE_VERIFY_WINDOW: UpstreamEvent.RETIRE_WINDOW,
    MessageKind.STOP: UpstreamEvent.STOP,
    MessageKind.PREDICTION_RETURN_OPEN: UpstreamEvent.RETURN_OPEN,
    MessageKind.STATE_IMPORT: UpstreamEvent.STATE_TRANSFER,
    MessageKind.STATE_EXPORT: UpstreamEvent.STATE_TRANSFER,
}


class UpstreamConnection(Machine[UpstreamState, UpstreamEvent]):
    """What a stage accepts on one connection from upstream: one request at a time.

    ``receive(message)`` for every message in order; ``stopped()`` when Stop was handled, just *before* its
    Ack is handed to the writer; ``receive_eof()`` at end of stream; ``close()`` when we give up.
    """

    def __init__(self) -> None:
        super().__init__("upstream connection", UPSTREAM, UpstreamState.IDLE)
        self._live: tuple[int, int] | None = None
        self._configured = False

    @property
    def live(self) -> tuple[int, int] | None:
        """(request_id, session_id) of the request in progress; None when idle."""
        return self._live

    @property
    def configured(self) -> bool:
        """Whether the live request has had its ConfigureGeneration."""
        return self._configured

    def receive(self, message: Message, *, stale: bool = False) -> UpstreamEvent:
        """Check that ``message`` fits here and now, and step.

        A ``stale`` one (:meth:`~skippy.protocol.Session.is_stale`) fits wherever a request is live, and
        changes nothing.

        Raises:
            RemoteProtocolError: the kind does not fit the state, the header's phase or flags do not match the
                kind (data kinds), or the ids are not those of the live request.
        """
        kind = message.kind
        event = UpstreamEvent.STALE if stale else _UPSTREAM_EVENTS[kind]
        if event is UpstreamEvent.STATE_TRANSFER:
            raise RemoteProtocolError(f"{kind.name} does not fit: no stage takes or gives session state")
        state = self._check(event, RemoteProtocolError)
        if kind in DATA_KINDS and not state_matches_kind(kind, message.state):
            raise RemoteProtocolError(
                f"header phase {message.state.phase} and flags {message.state.flags:#x} "
                f"do not match {kind.name}"
            )
        ids = (message.request_id, message.session_id)
        if self._live is not None and ids != self._live:
            raise RemoteProtocolError(
                f"{kind.name} for request {ids[0]} session {ids[1]} while request {self._live[0]} "
                f"session {self._live[1]} is live on this connection"
            )
        self._state = state
        if event is not UpstreamEvent.PROBE:
            self._live = ids
        if event is UpstreamEvent.CONFIGURE:
            self._configured = True
        return event

    def restore_missed(self) -> None:
        """A TryRestorePrefillDecode was a miss: the request may prefill after all."""
        self._local(UpstreamEvent.RESTORE_MISSED)

    def restore_hit(self) -> None:
        """A TryRestorePrefillDecode was answered with a token."""
        self._local(UpstreamEvent.RESTORE_HIT)

    def stopped(self) -> None:
        """The Stop was carried out; its Ack goes out next, so the peer may start another request."""
        self._local(UpstreamEvent.STOPPED)
        self._live = None
        self._configured = False

    def receive_eof(self) -> None:
        """The peer closed its side. A normal end when idle; RemoteProtocolError when a request was live.

        Closed either way.
        """
        live = self._live
        self.close()
        if live is not None:
            raise RemoteProtocolError(
                f"end of stream while request {live[0]} is live", ErrorKind.UNEXPECTED_EOF
            )

    def close(self) -> None:
        """Nothing more is accepted. Safe to call twice."""
        self._local(UpstreamEvent.CLOSE)
        self._live = None


class Lane(Machine[LaneState, LaneEvent]):
    """A connection to the downstream stage, leased to one request at a time.

    ``connected()`` → ``lease()`` → frames (``credit.send()``/``credit.ack()`` for those that an Ack answers,
    ``expect_prediction()``/``prediction()`` for the others) → ``stop()`` → ``stop_acknowledged()`` →
    ``release()``. ``fail()`` at any trouble, then ``retire()``.

    Attributes:
        credit: the lane's credit window; it outlives a lease.
        owed_predictions: predictions asked for and not yet read, whichever stream they come on.
    """

    def __init__(self, credit_limit: int) -> None:
        super().__init__("lane", LANE, LaneState.CONNECTING)
        self.credit = CreditWindow.open(credit_limit)
        self.owed_predictions = 0
        self._stop_acknowledged = False

    @property
    def returnable(self) -> bool:
        """Stop is acknowledged and every owed reply has been read: ``release()`` would work."""
        return (
            self._state is LaneState.STOPPING
            and self._stop_acknowledged
            and self.credit.drained
            and self.owed_predictions == 0
        )

    def connected(self) -> None:
        """The handshake is done: the lane is idle."""
        self._local(LaneEvent.CONNECTED)

    def lease(self) -> None:
        """Give the lane to a request. LocalProtocolError unless it is idle."""
        self._local(LaneEvent.LEASE)

    def expect_prediction(self) -> None:
        """A frame that a predicted reply answers is about to be sent."""
        if self._state is not LaneState.LEASED:
            raise LocalProtocolError(f"lane is {self._state.value}: no request may ask for a prediction")
        self.owed_predictions += 1

    def prediction(self) -> None:
        """A predicted reply for this lane was read. RemoteProtocolError when none was owed."""
        if self.owed_predictions == 0:
            raise RemoteProtocolError("prediction without a frame that asks for one")
        self.owed_predictions -= 1

    def stop(self) -> None:
        """Stop is about to be sent. LocalProtocolError with unread Acks, or unless leased."""
        if self._state is LaneState.LEASED and not self.credit.drained:
            raise LocalProtocolError(f"Stop with {self.credit.outstanding} unread Acks: drain them first")
        self._local(LaneEvent.STOP)
        self._stop_acknowledged = False

    def stop_acknowledged(self) -> None:
        """The Ack of Stop was read. RemoteProtocolError when no Stop waits for one."""
        if self._state is not LaneState.STOPPING or self._stop_acknowledged:
            raise RemoteProtocolError("Ack of a Stop that was not sent")
        self._stop_acknowledged = True

    def release(self) -> None:
        """Back to idle. LocalProtocolError unless ``returnable``: ``fail()`` and ``retire()`` it then."""
        if self._state is LaneState.STOPPING and not self.returnable:
            raise LocalProtocolError(
                f"lane cannot be returned: Stop {'' if self._stop_acknowledged else 'not '}acknowledged, "
                f"{self.credit.outstanding} Acks and {self.owed_predictions} predictions owed"
            )
        self._local(LaneEvent.RELEASE)

    def fail(self) -> None:
        """Something on the lane went wrong: it may only be retired now. Safe to call twice."""
        self._local(LaneEvent.FAIL)

    def retire(self) -> None:
        """The lane is closed for good. LocalProtocolError while leased or stopping: ``fail()`` it first."""
        self._local(LaneEvent.RETIRE)


class PredictionReturn(Machine[ReturnState, ReturnEvent]):
    """Stage 0's end of the stream that carries a lane's predictions.

    Made for the request that waits for it; ``opened(message)`` when the final stage dialled in;
    ``expect(kind)`` before each frame that a prediction answers (allowed while still opening);
    ``receive(reply)`` for each reply; ``release()`` when the request is done; ``bind(...)`` for the lane's
    next request.

    Attributes:
        owed: predictions expected and not yet read.
    """

    def __init__(self, request_id: int, session_id: int) -> None:
        super().__init__("prediction return", RETURN, ReturnState.OPENING)
        self._ids = (request_id, session_id)
        self._expected: deque[MessageKind] = deque()

    @property
    def bound(self) -> tuple[int, int] | None:
        """(request_id, session_id) that waits, or is waited for while opening; None when idle or closed."""
        return self._ids if self._state in (ReturnState.OPENING, ReturnState.BOUND) else None

    @property
    def owed(self) -> int:
        return len(self._expected)

    def opened(self, message: Message) -> None:
        """The first message of the stream arrived: it must be a bare PredictionReturnOpen with our ids."""
        state = self._check(ReturnEvent.OPENED, RemoteProtocolError)
        check_return_open(message)
        ids = (message.request_id, message.session_id)
        if ids != self._ids:
            raise RemoteProtocolError(f"return stream opened for {ids}, but {self._ids} is waiting")
        self._state = state

    def bind(self, request_id: int, session_id: int) -> None:
        """The lane's next request takes the stream over. LocalProtocolError when one has it already."""
        self._local(ReturnEvent.BIND)
        self._ids = (request_id, session_id)

    def expect(self, kind: MessageKind) -> None:
        """A frame of ``kind`` is about to be sent whose prediction will come here."""
        allowed = reply_kinds(kind)
        if all(k.name == "ACK" for k in allowed):
            raise LocalProtocolError(f"{kind.name} is not answered by a prediction")
        self._local(ReturnEvent.EXPECT)
        self._expected.append(kind)

    def receive(self, reply: Reply) -> MessageKind:
        """A reply arrived; returns the kind of the message it answers.

        Raises:
            RemoteProtocolError: nothing is owed, or the reply's kind does not answer the oldest owed one.
        """
        self._check(ReturnEvent.REPLY, RemoteProtocolError)
        if not self._expected:
            raise RemoteProtocolError(f"{reply.kind.name} on a return stream that owes nothing")
        kind = self._expected[0]
        if reply.kind not in reply_kinds(kind):
            raise RemoteProtocolError(f"{reply.kind.name} does not answer {kind.name}")
        return self._expected.popleft()

    def release(self) -> None:
        """The request is done. LocalProtocolError while predictions are owed: close the stream then."""
        if self._expected:
            raise LocalProtocolError(f"return stream released with {self.owed} predictions owed")
        self._local(ReturnEvent.RELEASE)

    def receive_eof(self) -> None:
        """The peer closed the stream; RemoteProtocolError unless idle. Closed either way."""
        idle = self._state in (ReturnState.IDLE, ReturnState.CLOSED)
        self.close()
        if not idle:
            raise RemoteProtocolError(
                "return stream ended while a request was bound to it", ErrorKind.UNEXPECTED_EOF
            )

    def close(self) -> None:
        """Nothing more is accepted. Safe to call twice."""
        self._local(ReturnEvent.CLOSE)
        self._expected.clear()


def check_return_open(message: Message) -> None:
    """RemoteProtocolError unless ``message`` is a bare PredictionReturnOpen: two ids and nothing else."""
    if message.kind is not MessageKind.PREDICTION_RETURN_OPEN:
        raise RemoteProtocolError(
            f"a return stream starts with PREDICTION_RETURN_OPEN, not {message.kind.name}"
        )
    if not state_matches_kind(message.kind, message.state):
        raise RemoteProtocolError("header of PREDICTION_RETURN_OPEN does not match its kind")
    extra = message.sampling is not None or message.chat_sampling_metadata is not None
    if (
        extra
        or message.token_count
        or len(message.tokens)
        or len(message.positions)
        or len(message.activation)
    ):
        raise RemoteProtocolError("PREDICTION_RETURN_OPEN carries more than its two ids")

"""States, events and transition tables of the protocol's machines.

Prose first, then the tables; :mod:`skippy.protocol.machines`, :mod:`skippy.protocol.session`,
:mod:`skippy.protocol.verify` and :mod:`skippy.protocol.handshake` hold the current state and the counters. A
pair that is not in a table is an error: :class:`LocalProtocolError` when our own caller caused the event,
:class:`RemoteProtocolError` when the peer did. The diagrams of ``docs/protocol.md`` are printed from these
tables (``python -m skippy.protocol diagrams``).

Handshake
    The dialer sends its credentials, if any, and waits for the ready word; then it asks for admission and
    waits for the answer. The listener checks the credentials, if it has a token, then owes the ready word;
    then it waits for the request and answers it. Frames flow only after admission. A peer that only knows the
    ready word skips the last step, and is refused unless it is allowed to.

Upstream connection
    What one stage accepts from the stage (or driver) in front of it. It carries one request at a time. The
    prompt comes in chunks; the generation settings may come before, between or after them, but before the
    first decode. A final prefill chunk samples, so it starts decoding. Stop ends the request; when we have
    acknowledged it the connection is idle again and may carry the next request. A cache probe asks a question
    and leaves the state alone, as does a stale frame: it is answered, and nothing else. So does a trim, which
    may come first, since a stage that misses a prefix asks nobody behind it. A fused restore-and-decode is
    undecided until its answer: a hit has begun to decode, a miss falls back to where prefill may start. A
    stage between the ends does not see the answer; what comes next decides.
    State transfer and a return-stream open fit nowhere here.

Lane
    Stage 0's view of a connection to its downstream. It is leased to one request. After Stop was
    acknowledged, and only when every owed reply has been read, it is idle again. A lane on which anything
    failed is suspect: it cannot be leased or stopped, only retired.

Session
    What a stage holds for one request: nothing yet (new), or some positions (live). Stop makes it new again.

Prediction return
    The stream on which the final stage answers stage 0. It opens once per lane, bound to the request that was
    running; between requests it is idle.

Verify window
    Proposed tokens that run at once. A window is open until its answer, which commits it: its predictions
    count, and its positions belong to the session. A rewind below its end makes an open one stale: it is
    answered all the same, in its turn, and then discarded. A committed one that is taken back, or that
    nobody will ask to be taken back any more, is retired. A request has many windows, first in, first out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class TableEnum(enum.Enum):
    """States and events: keys of the tables, looked up for every frame."""

    # Members are single objects, so identity is a right hash; the one of Enum is a call into Python.
    __hash__ = object.__hash__


class HandshakeState(TableEnum):
    AWAIT_AUTH = "await-auth"
    OWE_READY = "owe-ready"
    AWAIT_READY = "await-ready"
    AWAIT_ADMISSION = "await-admission"
    ADMITTED = "admitted"
    CLOSED = "closed"


class HandshakeEvent(TableEnum):
    AUTH_ACCEPTED = "auth accepted"
    READY_SENT = "ready sent"
    READY_RECEIVED = "ready received"
    READY_SENT_PLAIN = "ready sent, plain"
    READY_RECEIVED_PLAIN = "ready received, plain"
    ADMISSION_AGREED = "admission agreed"
    FRAME_RECEIVED = "frame received"
    CLOSE = "close"


_HS, _HE = HandshakeState, HandshakeEvent
HANDSHAKE: Final[Mapping[HandshakeState, Mapping[HandshakeEvent, HandshakeState]]] = {
    _HS.AWAIT_AUTH: {_HE.AUTH_ACCEPTED: _HS.OWE_READY, _HE.CLOSE: _HS.CLOSED},
    _HS.OWE_READY: {
        _HE.READY_SENT: _HS.AWAIT_ADMISSION,
        _HE.READY_SENT_PLAIN: _HS.ADMITTED,
        _HE.CLOSE: _HS.CLOSED,
    },
    _HS.AWAIT_READY: {
        _HE.READY_RECEIVED: _HS.AWAIT_ADMISSION,
        _HE.READY_RECEIVED_PLAIN: _HS.ADMITTED,
        _HE.CLOSE: _HS.CLOSED,
    },
    _HS.AWAIT_ADMISSION: {
        _HE.ADMISSION_AGREED: _HS.ADMITTED,
        _HE.FRAME_RECEIVED: _HS.ADMITTED,
        _HE.CLOSE: _HS.CLOSED,
    },
    _HS.ADMITTED: {_HE.CLOSE: _HS.CLOSED},
    _HS.CLOSED: {},
}


class UpstreamState(TableEnum):
    IDLE = "idle"
    PREFILLING = "prefilling"
    CONFIGURED = "configured"
    FUSED = "fused"
    DECODING = "decoding"
    STOPPING = "stopping"
    CLOSED = "closed"


class UpstreamEvent(TableEnum):
    PREFILL = "prefill"
    PREFILL_FINAL = "final prefill"
    CONFIGURE = "configure"
    DECODE = "decode"
    REPLAY = "replay"
    REPLAY_FINAL = "final replay"
    PROBE = "probe"
    RESTORE = "restore"
    RESTORE_DECODE = "restore and decode"
    RESTORE_HIT = "restore hit"
    RESTORE_MISSED = "restore missed"
    TRIM = "trim"
    RETIRE_WINDOW = "retire window"
    STALE = "stale frame"
    STOP = "stop"
    STOPPED = "stopped"
    RETURN_OPEN = "return open"
    STATE_TRANSFER = "state transfer"
    CLOSE = "close"


_US, _UE = UpstreamState, UpstreamEvent
UPSTREAM: Final[Mapping[UpstreamState, Mapping[UpstreamEvent, UpstreamState]]] = {
    _US.IDLE: {
        _UE.PREFILL: _US.PREFILLING,
        _UE.PREFILL_FINAL: _US.DECODING,
        _UE.CONFIGURE: _US.CONFIGURED,
        _UE.REPLAY: _US.PREFILLING,
        _UE.REPLAY_FINAL: _US.DECODING,
        _UE.PROBE: _US.IDLE,
        _UE.RESTORE: _US.PREFILLING,
        _UE.RESTORE_DECODE: _US.FUSED,
        _UE.TRIM: _US.IDLE,
        _UE.STOP: _US.STOPPING,
        _UE.CLOSE: _US.CLOSED,
    },
    _US.PREFILLING: {
        _UE.PREFILL: _US.PREFILLING,
        _UE.PREFILL_FINAL: _US.DECODING,
        _UE.CONFIGURE: _US.CONFIGURED,
        _UE.DECODE: _US.DECODING,
        _UE.REPLAY: _US.PREFILLING,
        _UE.REPLAY_FINAL: _US.DECODING,
        _UE.PROBE: _US.PREFILLING,
        _UE.RESTORE: _US.PREFILLING,
        _UE.RESTORE_DECODE: _US.FUSED,
        _UE.TRIM: _US.PREFILLING,
        _UE.STALE: _US.PREFILLING,
        _UE.STOP: _US.STOPPING,
        _UE.CLOSE: _US.CLOSED,
    },
    _US.CONFIGURED: {
        _UE.PREFILL: _US.CONFIGURED,
        _UE.PREFILL_FINAL: _US.DECODING,
        _UE.CONFIGURE: _US.CONFIGURED,
        _UE.DECODE: _US.DECODING,
        _UE.REPLAY: _US.CONFIGURED,
        _UE.REPLAY_FINAL: _US.DECODING,
        _UE.PROBE: _US.CONFIGURED,
        _UE.RESTORE: _US.CONFIGURED,
        _UE.RESTORE_DECODE: _US.FUSED,
        _UE.TRIM: _US.CONFIGURED,
        _UE.STALE: _US.CONFIGURED,
        _UE.STOP: _US.STOPPING,
        _UE.CLOSE: _US.CLOSED,
    },
    _US.FUSED: {
        _UE.PREFILL: _US.PREFILLING,
        _UE.PREFILL_FINAL: _US.DECODING,
        _UE.CONFIGURE: _US.CONFIGURED,
        _UE.DECODE: _US.DECODING,
        _UE.REPLAY: _US.PREFILLING,
        _UE.REPLAY_FINAL: _US.DECODING,
        _UE.PROBE: _US.FUSED,
        _UE.RESTORE: _US.PREFILLING,
        _UE.RESTORE_DECODE: _US.FUSED,
        _UE.RESTORE_HIT: _US.DECODING,
        _UE.RESTORE_MISSED: _US.PREFILLING,
        _UE.TRIM: _US.FUSED,
        _UE.STALE: _US.FUSED,
        _UE.STOP: _US.STOPPING,
        _UE.CLOSE: _US.CLOSED,
    },
    _US.DECODING: {
        _UE.DECODE: _US.DECODING,
        _UE.REPLAY: _US.DECODING,
        _UE.REPLAY_FINAL: _US.DECODING,
        _UE.TRIM: _US.DECODING,
        _UE.STALE: _US.DECODING,
        _UE.RETIRE_WINDOW: _US.DECODING,
        _UE.STOP: _US.STOPPING,
        _UE.CLOSE: _US.CLOSED,
    },
    _US.STOPPING: {_UE.STOPPED: _US.IDLE, _UE.CLOSE: _US.CLOSED},
    _US.CLOSED: {_UE.CLOSE: _US.CLOSED},
}


class LaneState(TableEnum):
    CONNECTING = "connecting"
    IDLE = "idle"
    LEASED = "leased"
    STOPPING = "stopping"
    SUSPECT = "suspect"
    RETIRED = "retired"


class LaneEvent(TableEnum):
    CONNECTED = "connected"
    LEASE = "lease"
    STOP = "stop"
    RELEASE = "release"
    FAIL = "fail"
    RETIRE = "retire"


LANE: Final[Mapping[LaneState, Mapping[LaneEvent, LaneState]]] = {
    LaneState.CONNECTING: {
        LaneEvent.CONNECTED: LaneState.IDLE,
        LaneEvent.FAIL: LaneState.SUSPECT,
        LaneEvent.RETIRE: LaneState.RETIRED,
    },
    LaneState.IDLE: {
        LaneEvent.LEASE: LaneState.LEASED,
        LaneEvent.FAIL: LaneState.SUSPECT,
        LaneEvent.RETIRE: LaneState.RETIRED,
    },
    LaneState.LEASED: {LaneEvent.STOP: LaneState.STOPPING, LaneEvent.FAIL: LaneState.SUSPECT},
    LaneState.STOPPING: {LaneEvent.RELEASE: LaneState.IDLE, LaneEvent.FAIL: LaneState.SUSPECT},
    LaneState.SUSPECT: {LaneEvent.FAIL: LaneState.SUSPECT, LaneEvent.RETIRE: LaneState.RETIRED},
    LaneState.RETIRED: {LaneEvent.FAIL: LaneState.RETIRED, LaneEvent.RETIRE: LaneState.RETIRED},
}


class SessionState(TableEnum):
    NEW = "new"
    LIVE = "live"


class SessionEvent(TableEnum):
    DATA = "data"
    RESTORED = "restored"
    TRIM = "trim"
    STOP = "stop"


SESSION: Final[Mapping[SessionState, Mapping[SessionEvent, SessionState]]] = {
    SessionState.NEW: {
        SessionEvent.DATA: SessionState.LIVE,
        SessionEvent.RESTORED: SessionState.LIVE,
        SessionEvent.TRIM: SessionState.NEW,
        SessionEvent.STOP: SessionState.NEW,
    },
    SessionState.LIVE: {
        SessionEvent.DATA: SessionState.LIVE,
        SessionEvent.TRIM: SessionState.LIVE,
        SessionEvent.STOP: SessionState.NEW,
    },
}


class ReturnState(TableEnum):
    OPENING = "opening"
    BOUND = "bound"
    IDLE = "idle"
    CLOSED = "closed"


class ReturnEvent(TableEnum):
    OPENED = "opened"
    BIND = "bind"
    EXPECT = "expect"
    REPLY = "reply"
    RELEASE = "release"
    CLOSE = "close"


RETURN: Final[Mapping[ReturnState, Mapping[ReturnEvent, ReturnState]]] = {
    ReturnState.OPENING: {
        ReturnEvent.OPENED: ReturnState.BOUND,
        ReturnEvent.EXPECT: ReturnState.OPENING,
        ReturnEvent.CLOSE: ReturnState.CLOSED,
    },
    ReturnState.BOUND: {
        ReturnEvent.EXPECT: ReturnState.BOUND,
        ReturnEvent.REPLY: ReturnState.BOUND,
        ReturnEvent.RELEASE: ReturnState.IDLE,
        ReturnEvent.CLOSE: ReturnState.CLOSED,
    },
    ReturnState.IDLE: {ReturnEvent.BIND: ReturnState.BOUND, ReturnEvent.CLOSE: ReturnState.CLOSED},
    ReturnState.CLOSED: {ReturnEvent.CLOSE: ReturnState.CLOSED},
}


class WindowState(TableEnum):
    OPEN = "open"
    COMMITTED = "committed"
    STALE = "stale"
    RETIRED = "retired"


class WindowEvent(TableEnum):
    COMMIT = "commit"
    DISCARD = "discard"
    REWIND = "rewind"
    RETIRE = "retire"


WINDOW: Final[Mapping[WindowState, Mapping[WindowEvent, WindowState]]] = {
    WindowState.OPEN: {WindowEvent.COMMIT: WindowState.COMMITTED, WindowEvent.REWIND: WindowState.STALE},
    WindowState.COMMITTED: {
        WindowEvent.REWIND: WindowState.RETIRED,
        WindowEvent.RETIRE: WindowState.RETIRED,
    },
    WindowState.STALE: {WindowEvent.DISCARD: WindowState.RETIRED, WindowEvent.REWIND: WindowState.STALE},
    WindowState.RETIRED: {},
}

"""What goes over the wire, and in which order.

Here live kinds, messages, the codec, the handshake and the state machines: bytes in, values out, no I/O.
Import the names below from here. Never here: trio, sockets, llama.cpp, clocks.
"""

from . import stats
from .codec import (
    MessageDecoder,
    ReplyDecoder,
    encode_frame,
    encode_message,
    encode_reply,
    estimated_wire_bytes,
)
from .epochs import EPOCH_KINDS, RequestEpoch, VerifyWindowRange, authoritative_position, verify_window
from .errors import ErrorKind, LocalProtocolError, ProtocolError, RemoteProtocolError
from .float32 import Float32NaN, bits_of_float, float_of_bits
from .handshake import READY_WORD, DialerHandshake, ListenerHandshake, encode_transport_auth
from .kinds import MessageKind, ReplyKind, SamplingFlag, StateFlag
from .machines import CreditWindow, Lane, Machine, PredictionReturn, UpstreamConnection, check_return_open
from .messages import (
    EMPTY_STATS,
    Buffer,
    Message,
    NativeMtpDraft,
    Reply,
    ReplyStats,
    SamplingConfig,
    StageState,
)
from .rules import (
    DATA_KINDS,
    PREDICTED_KINDS,
    activation_bytes,
    activation_multiplier,
    carries_activation,
    check_activation,
    default_state,
    execution_tokens,
    frame_flags_of,
    reply_kinds,
    requires_predicted_reply,
    state_flags_of,
    state_matches_kind,
)
from .session import Action, Session, Verb
from .states import (
    HandshakeEvent,
    HandshakeState,
    LaneEvent,
    LaneState,
    ReturnEvent,
    ReturnState,
    SessionEvent,
    SessionState,
    UpstreamEvent,
    UpstreamState,
)

__all__ = [
    "DATA_KINDS",
    "EMPTY_STATS",
    "EPOCH_KINDS",
    "PREDICTED_KINDS",
    "READY_WORD",
    "Action",
    "Buffer",
    "CreditWindow",
    "DialerHandshake",
    "ErrorKind",
    "Float32NaN",
    "HandshakeEvent",
    "HandshakeState",
    "Lane",
    "LaneEvent",
    "LaneState",
    "ListenerHandshake",
    "LocalProtocolError",
    "Machine",
    "Message",
    "MessageDecoder",
    "MessageKind",
    "NativeMtpDraft",
    "PredictionReturn",
    "ProtocolError",
    "RemoteProtocolError",
    "Reply",
    "ReplyDecoder",
    "ReplyKind",
    "ReplyStats",
    "RequestEpoch",
    "ReturnEvent",
    "ReturnState",
    "SamplingConfig",
    "SamplingFlag",
    "Session",
    "SessionEvent",
    "SessionState",
    "StageState",
    "StateFlag",
    "UpstreamConnection",
    "UpstreamEvent",
    "UpstreamState",
    "Verb",
    "VerifyWindowRange",
    "activation_bytes",
    "activation_multiplier",
    "authoritative_position",
    "bits_of_float",
    "carries_activation",
    "check_activation",
    "check_return_open",
    "default_state",
    "encode_frame",
    "encode_message",
    "encode_reply",
    "encode_transport_auth",
    "estimated_wire_bytes",
    "execution_tokens",
    "float_of_bits",
    "frame_flags_of",
    "reply_kinds",
    "requires_predicted_reply",
    "state_flags_of",
    "state_matches_kind",
    "stats",
    "verify_window",
]

"""Values of the golden file's JSON, as ours: messages, replies, sampling blocks, statistics.

The form is that of ``tests/protocol/golden/frames.json`` (its ``how_to_read``): integers are JSON integers,
bytes are hex, a float comes as a decimal (or ``nan``, ``inf``, ``-inf``) and, where given, as its 32 bits.
"""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from .float32 import bits_of_float, float_of_bits
from .kinds import MessageKind, ReplyKind
from .messages import Message, NativeMtpDraft, Reply, ReplyStats, SamplingConfig, StageState
from .rules import default_state

Json = dict[str, Any]

_MOST_VALUES: Final = 1 << 24
_STATE_FIELDS: Final = tuple(a.name for a in attrs.fields(StageState))
_STATS_FIELDS: Final = tuple(a.name for a in attrs.fields(ReplyStats))
_SAMPLING_FLOATS: Final = frozenset(
    a.name for a in attrs.fields(SamplingConfig) if isinstance(a.default, float)
)


class FormError(Exception):
    """The file does not have the form this checker understands."""


def camel_case(kind: MessageKind | ReplyKind) -> str:
    """``PREFILL_EMBD`` → ``PrefillEmbd``, the spelling of the files."""
    return "".join(part.capitalize() for part in kind.name.split("_"))


_MESSAGE_KINDS: Final = {camel_case(kind): kind for kind in MessageKind}
_REPLY_KINDS: Final = {camel_case(kind): kind for kind in ReplyKind}


def message_kind(name: str) -> MessageKind:
    try:
        return _MESSAGE_KINDS[name]
    except KeyError:
        raise FormError(f"unknown message kind {name!r}") from None


def hex_bytes(text: str) -> bytes:
    if not re.fullmatch(r"([0-9a-f]{2})*", text):
        raise FormError("bytes are not lower-case hex")
    return bytes.fromhex(text)


def length_of(data: Json, name: str) -> int:
    """A count in place of the values themselves; 0 when absent."""
    length = data.get(name, 0)
    if not isinstance(length, int) or not 0 <= length <= _MOST_VALUES:
        raise FormError(f"{name} is {length!r}, not an integer from 0 to {_MOST_VALUES}")
    return length


def _float(value: Any, bits: str | None) -> float:
    return float_of_bits(int(bits, 16)) if bits is not None else float(value)


def sampling_of(data: Json) -> SamplingConfig:
    bits = data.get("f32_bits", {})
    fields: Json = {}
    for field in attrs.fields(SamplingConfig):
        value = data[field.name]
        if field.name in _SAMPLING_FLOATS:
            value = _float(value, bits.get(field.name))
        elif field.name == "logit_bias":
            value = tuple((b["token_id"], _float(b["bias"], b.get("bias_bits"))) for b in value)
        elif isinstance(value, list):
            value = tuple(value)
        fields[field.name] = value
    return SamplingConfig(**fields)


def message_of(data: Json) -> Message:
    """A message as the file describes it, or a large one given by lengths only (writer errors)."""
    kind = message_kind(data["kind"])
    if "state" not in data:
        return Message(
            kind,
            default_state(kind),
            tokens=(0,) * length_of(data, "tokens_length"),
            positions=(0,) * length_of(data, "positions_length"),
            chat_sampling_metadata="x" * length_of(data, "chat_sampling_metadata_ascii_length") or None,
        )
    if data.get("kind_value", int(kind)) != kind:
        raise FormError(f"kind_value {data['kind_value']} is not {data['kind']}")
    return Message(
        kind,
        StageState(*(data["state"][name] for name in _STATE_FIELDS)),
        data["pos_start"],
        data["token_count"],
        data["request_id"],
        data["session_id"],
        None if data["sampling"] is None else sampling_of(data["sampling"]),
        data["chat_sampling_metadata"],
        tuple(data["tokens"]),
        tuple(data["positions"]),
        hex_bytes(data["activation_hex"]),
        hex_bytes(data["raw_bytes_hex"]),
    )


def stats_of(data: Json) -> ReplyStats:
    unknown = set(data) - set(_STATS_FIELDS)
    if unknown:
        raise FormError(f"unknown statistics {', '.join(sorted(unknown))}")
    return ReplyStats(**data)


def reply_of(data: Json) -> Reply:
    if data["kind"] not in _REPLY_KINDS:
        raise FormError(f"unknown reply kind {data['kind']!r}")
    draft = data["native_mtp_draft"]
    return Reply(
        _REPLY_KINDS[data["kind"]],
        data["predicted"],
        tuple(data["predicted_tokens"]),
        data["window_id"],
        None if draft is None else draft_of(draft),
        stats_of(data["stats"]),
    )


def draft_of(data: Json) -> NativeMtpDraft:
    return NativeMtpDraft(tuple(data["token_ids"]), data["proposal_compute_us"])


def canonical_sampling(config: SamplingConfig | None) -> tuple[Any, ...] | None:
    """Something that is equal exactly when every bit is."""
    if config is None:
        return None
    values: list[Any] = []
    for field in attrs.fields(SamplingConfig):
        value = getattr(config, field.name)
        if field.name in _SAMPLING_FLOATS:
            value = bits_of_float(value)
        elif field.name == "logit_bias":
            value = tuple((token, bits_of_float(bias)) for token, bias in value)
        values.append((field.name, value))
    return tuple(values)


def canonical_message(message: Message) -> Json:
    """Something that is equal exactly when the messages are, bit for bit."""
    return {
        "kind": message.kind,
        "state": message.state,
        "pos_start": message.pos_start,
        "token_count": message.token_count,
        "request_id": message.request_id,
        "session_id": message.session_id,
        "sampling": canonical_sampling(message.sampling),
        "chat_sampling_metadata": message.chat_sampling_metadata,
        "tokens": tuple(message.tokens),
        "positions": tuple(message.positions),
        "activation": bytes(message.activation),
        "raw_bytes": bytes(message.raw_bytes),
    }

"""Admission: what two stages tell each other, and compare, before the first frame.

Frames carry no length, so a wrong activation width would lose sync without anybody noticing, and a gap in the
layers would give wrong tokens. So the dialer says what it is, what it expects of the listener and what it
will send; the listener compares that with what it has loaded, and echoes it or says what differs.

Packet::

    u32 magic 0x53545053 | u32 version 1 | u32 length, at most 65536 | JSON object of that many bytes

Sans-IO. Source: ``docs/protocol.md``, section "Admission".
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Iterable
from typing import Any, Final

import attrs

from .descriptor import (
    U32_MAX,
    StageAdmissionDescriptor,
    descriptor_difference,
    parse_descriptor,
)
from .errors import LocalProtocolError, RemoteProtocolError
from .kinds import ADMISSION_MAGIC, ADMISSION_VERSION, MAX_ADMISSION_BYTES, MAX_ADMISSION_EXTENSIONS
from .strict_json import Fields, canonical_json, parse_object

_HEAD: Final = struct.Struct("<3I")
ADMISSION_WORD: Final = struct.pack("<I", ADMISSION_MAGIC)
MAX_REASON_CHARACTERS: Final = 400


class ConnectionRole(enum.Enum):
    """What a connection is for."""

    LANE = "lane"
    """Messages go down, replies come up."""
    RETURN = "return"
    """The last stage's predictions to stage 0."""


_ROLES: Final = {role.value: role for role in ConnectionRole}


@attrs.frozen(slots=True, kw_only=True)
class AdmissionRequest:
    """The dialer's packet. None stands for what the dialer cannot know.

    Attributes:
        role: what the connection is for.
        sender_id, sender_index: the dialer; index -1 is a driver, which is no stage.
        target_id, target_index: whom the dialer means to reach.
        layer_start, layer_end: the layers that the target must have.
        run_id, topology_id, model_id: of the dialer's configuration.
        layer_count: layers of the whole model.
        package_id: content of the model that the dialer's part was cut from.
        activation_width: f32 values per token that the dialer will send; 0 for a driver and a return stream.
        cache_type_k, cache_type_v: element types of the dialer's KV cache.
        context_length: positions of one session, in tokens.
        batch_rows: tokens that one frame may carry.
        descriptor: what the target must hold, exactly.
        descriptor_sha256: its digest; also given alone, where the descriptor does not fit into a packet.
        extensions: names of what the dialer can do beyond generation 8, strictly ascending.
    """

    role: ConnectionRole
    sender_id: str
    sender_index: int
    target_id: str | None
    target_index: int
    layer_start: int
    layer_end: int | None
    run_id: str
    topology_id: str
    model_id: str
    layer_count: int | None
    package_id: str | None
    activation_width: int
    cache_type_k: str | None
    cache_type_v: str | None
    context_length: int
    batch_rows: int
    descriptor: StageAdmissionDescriptor | None = None
    descriptor_sha256: str | None = None
    extensions: tuple[str, ...] = ()


@attrs.frozen(slots=True)
class Refusal:
    """Why a peer is not admitted."""

    field: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


@attrs.frozen(slots=True, kw_only=True)
class AdmissionAnswer:
    """The listener's packet: the descriptor of what it holds and the agreed extensions, or a refusal.

    ``descriptor`` is None on an accepting answer only where it does not fit into a packet.
    """

    descriptor: StageAdmissionDescriptor | None = None
    descriptor_sha256: str | None = None
    extensions: tuple[str, ...] = ()
    refusal: Refusal | None = None

    @property
    def accepted(self) -> bool:
        return self.refusal is None


@attrs.frozen(slots=True, kw_only=True)
class LoadedStage:
    """What a listener has loaded, as far as peers may ask.

    Attributes:
        input_width: f32 values per token at its input; 0 where token ids enter.
        batch_rows: tokens that one frame may carry at most.
        extensions: names of what it can do beyond generation 8.
    """

    stage_id: str
    stage_index: int
    run_id: str
    topology_id: str
    model_id: str
    layer_count: int
    input_width: int
    cache_type_k: str
    cache_type_v: str
    context_length: int
    batch_rows: int
    descriptor: StageAdmissionDescriptor
    extensions: tuple[str, ...] = ()


def admit(request: AdmissionRequest, loaded: LoadedStage) -> AdmissionAnswer:
    """Compare a request with what is loaded. Pure: same input, same answer, no error."""
    refusal = _first_difference(request, loaded)
    if refusal is not None:
        return AdmissionAnswer(refusal=refusal)
    agreed = tuple(name for name in request.extensions if name in loaded.extensions)
    descriptor = loaded.descriptor
    answer = AdmissionAnswer(descriptor=descriptor, descriptor_sha256=descriptor.digest, extensions=agreed)
    # Whoever sent a digest alone knows the descriptor; for others the digest is the most that fits.
    alone = request.descriptor is None and request.descriptor_sha256 is not None
    return attrs.evolve(answer, descriptor=None) if alone or not fits(answer) else answer


def _first_difference(request: AdmissionRequest, loaded: LoadedStage) -> Refusal | None:
    for field, expected, found in _comparisons(request, loaded):
        if expected != found:
            return Refusal(field, shorten(expected), shorten(found))
    if request.batch_rows > loaded.batch_rows:
        return Refusal("batch_rows", f"at most {loaded.batch_rows}", str(request.batch_rows))
    if request.descriptor is not None:
        difference = descriptor_difference(loaded.descriptor, request.descriptor)
        if difference is not None:
            field, expected, found = difference
            return Refusal(f"descriptor.{field}", shorten(expected), shorten(found))
    digest = request.descriptor_sha256
    if digest is not None and digest != loaded.descriptor.digest:
        return Refusal("descriptor_sha256", loaded.descriptor.digest, digest)
    return None


def _comparisons(request: AdmissionRequest, loaded: LoadedStage) -> Iterable[tuple[str, object, object]]:
    """(field, expected, found) in order; what the dialer cannot know is left out."""
    own = loaded.descriptor
    is_lane = request.role is ConnectionRole.LANE
    takes_returns = loaded.stage_index == 0 and own.layer_end < loaded.layer_count
    yield "role", request.role.value if is_lane or takes_returns else "lane", request.role.value
    for name in ("topology_id", "run_id", "model_id"):
        yield name, getattr(loaded, name), getattr(request, name)
    yield "target_index", loaded.stage_index, request.target_index
    if request.target_id is not None:
        yield "target_id", loaded.stage_id, request.target_id
    if is_lane:
        yield "sender_index", loaded.stage_index - 1, request.sender_index
    else:
        yield "sender_index", max(request.sender_index, 1), request.sender_index
    yield "layer_start", own.layer_start, request.layer_start
    if request.layer_end is not None:
        yield "layer_end", own.layer_end, request.layer_end
    if request.layer_count is not None:
        yield "layer_count", loaded.layer_count, request.layer_count
    if request.package_id is not None:
        yield "package_id", own.package_id, request.package_id
    yield "activation_width", loaded.input_width if is_lane else 0, request.activation_width
    for name in ("cache_type_k", "cache_type_v"):
        if getattr(request, name) is not None:
            yield name, getattr(loaded, name), getattr(request, name)
    yield "context_length", loaded.context_length, request.context_length


def check_answer(request: AdmissionRequest, answer: AdmissionAnswer) -> None:
    """The dialer's side: the answer must fit what was asked.

    Raises:
        RemoteProtocolError: refused, with the peer's reason, or an echo that differs.
    """
    if answer.refusal is not None:
        raise RemoteProtocolError(f"it refuses this stage: {answer.refusal}")
    extra = [name for name in answer.extensions if name not in request.extensions]
    if extra:
        raise RemoteProtocolError(f"its admission answer agrees to {extra[0][:80]!r}, which was not offered")
    if request.descriptor_sha256 not in (None, answer.descriptor_sha256):
        raise RemoteProtocolError("its admission answer echoes another descriptor than the one sent")
    held = answer.descriptor
    if held is None:
        return
    for field, expected, found in (
        ("layer_start", request.layer_start, held.layer_start),
        ("layer_end", request.layer_end, held.layer_end),
        ("package_id", request.package_id, held.package_id),
    ):
        if expected is not None and expected != found:
            raise RemoteProtocolError(f"its admission answer has {field} {found}, not {expected}")


def shorten(value: object) -> str:
    """The value as a refusal quotes it."""
    text = str(value)
    return text if len(text) <= MAX_REASON_CHARACTERS else text[: MAX_REASON_CHARACTERS - 1] + "…"


# -- bytes ----------------------------------------------------------------------------------------------


def with_descriptor(request: AdmissionRequest, descriptor: StageAdmissionDescriptor) -> AdmissionRequest:
    """``request`` with the descriptor it expects, or with its digest alone where it does not fit."""
    digest = descriptor.digest
    full = attrs.evolve(request, descriptor=descriptor, descriptor_sha256=digest)
    return full if fits(full) else attrs.evolve(request, descriptor=None, descriptor_sha256=digest)


def fits(packet: AdmissionRequest | AdmissionAnswer) -> bool:
    """Whether a packet can travel."""
    return len(_body(packet)) <= MAX_ADMISSION_BYTES


def encode_admission(packet: AdmissionRequest | AdmissionAnswer) -> bytes:
    """The packet on the wire.

    Raises:
        LocalProtocolError: it does not fit, or a peer would refuse it for its form.
    """
    body = _body(packet)
    if len(body) > MAX_ADMISSION_BYTES:
        raise LocalProtocolError(
            f"an admission packet of {len(body)} bytes; at most {MAX_ADMISSION_BYTES} can travel"
        )
    try:
        if isinstance(packet, AdmissionRequest):
            decode_request(body)
        else:
            decode_answer(body)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"not an admission packet that a peer would take: {error}") from None
    return _HEAD.pack(ADMISSION_MAGIC, ADMISSION_VERSION, len(body)) + body


def _body(packet: AdmissionRequest | AdmissionAnswer) -> bytes:
    value: dict[str, Any] = attrs.asdict(packet, value_serializer=_plain)
    if isinstance(packet, AdmissionAnswer):
        value["accepted"] = packet.accepted
    try:
        return canonical_json(value)
    except UnicodeEncodeError:
        raise LocalProtocolError("a text in the admission packet is not Unicode") from None


def _plain(_: object, __: object, value: Any) -> Any:
    return value.value if isinstance(value, ConnectionRole) else value


def admission_length(head: bytes | bytearray) -> int | None:
    """Length of the body behind ``head``, the bytes so far; None while more are needed to know.

    Each word is judged as soon as it is there.

    Raises:
        RemoteProtocolError: another magic, version, or too long.
    """
    if len(head) >= 4 and head[:4] != ADMISSION_WORD:
        raise RemoteProtocolError(f"no admission packet: it starts with {bytes(head[:4]).hex()}")
    if len(head) >= 8 and (version := int.from_bytes(head[4:8], "little")) != ADMISSION_VERSION:
        raise RemoteProtocolError(f"admission version {version}; this side speaks {ADMISSION_VERSION}")
    if len(head) < _HEAD.size:
        return None
    length = int.from_bytes(head[8:12], "little")
    if length > MAX_ADMISSION_BYTES:
        raise RemoteProtocolError(
            f"an admission packet of {length} bytes; at most {MAX_ADMISSION_BYTES} are allowed"
        )
    return length


ADMISSION_HEAD_BYTES: Final = _HEAD.size


def decode_request(body: bytes) -> AdmissionRequest:
    """A dialer's packet without its head. RemoteProtocolError names the field that is wrong."""
    fields = parse_object(body, "admission request")
    descriptor, digest = _descriptor_of(fields)
    request = AdmissionRequest(
        role=fields.choice("role", _ROLES),
        sender_id=fields.text("sender_id"),
        sender_index=fields.integer("sender_index", -1, U32_MAX),
        target_id=fields.text_or_null("target_id"),
        target_index=fields.integer("target_index", 0, U32_MAX),
        layer_start=fields.integer("layer_start", 0, U32_MAX),
        layer_end=fields.integer_or_null("layer_end", 1, U32_MAX),
        run_id=fields.text("run_id"),
        topology_id=fields.text("topology_id"),
        model_id=fields.text("model_id"),
        layer_count=fields.integer_or_null("layer_count", 1, U32_MAX),
        package_id=fields.text_or_null("package_id"),
        activation_width=fields.integer("activation_width", 0, U32_MAX),
        cache_type_k=fields.text_or_null("cache_type_k"),
        cache_type_v=fields.text_or_null("cache_type_v"),
        context_length=fields.integer("context_length", 1, U32_MAX),
        batch_rows=fields.integer("batch_rows", 1, U32_MAX),
        descriptor=descriptor,
        descriptor_sha256=digest,
        extensions=_extensions(fields),
    )
    fields.end()
    return request


def decode_answer(body: bytes) -> AdmissionAnswer:
    """A listener's packet without its head. RemoteProtocolError names the field that is wrong."""
    fields = parse_object(body, "admission answer")
    accepted = fields.boolean("accepted")
    descriptor, digest = _descriptor_of(fields)
    reason = fields.object_or_null("refusal")
    refusal = None
    if reason is not None:
        refusal = Refusal(reason.text("field"), reason.text("expected"), reason.text("found"))
        reason.end()
    answer = AdmissionAnswer(
        descriptor=descriptor, descriptor_sha256=digest, extensions=_extensions(fields), refusal=refusal
    )
    fields.end()
    if accepted is not answer.accepted:
        raise RemoteProtocolError("admission answer: field 'refusal' does not fit field 'accepted'")
    if accepted and digest is None:
        raise RemoteProtocolError("admission answer: field 'descriptor_sha256' is missing")
    return answer


def _descriptor_of(fields: Fields) -> tuple[StageAdmissionDescriptor | None, str | None]:
    inner = fields.object_or_null("descriptor")
    descriptor = None if inner is None else parse_descriptor(inner)
    digest = fields.text_or_null("descriptor_sha256")
    if descriptor is not None and digest != descriptor.digest:
        raise RemoteProtocolError("admission: field 'descriptor_sha256' is not the digest of 'descriptor'")
    return descriptor, digest


def _extensions(fields: Fields) -> tuple[str, ...]:
    names = fields.texts("extensions")
    if len(names) > MAX_ADMISSION_EXTENSIONS:
        raise RemoteProtocolError(
            f"admission: field 'extensions' has {len(names)} names; {MAX_ADMISSION_EXTENSIONS} are allowed"
        )
    if "" in names or any(a >= b for a, b in itertools.pairwise(names)):
        raise RemoteProtocolError("admission: field 'extensions' must be names, strictly sorted")
    return names

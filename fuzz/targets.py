"""The targets: each takes any bytes and returns, whatever they are.

One invariant: the bytes parse, or our own error is raised; never another exception, never more memory than
the limit. A target catches that one error; whatever else comes out of it is a finding. Where the code under
test promises more (pieces make no difference, what was decoded encodes again), the target asserts it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Final

from skippy.config import ConfigError, stage_config_from_json, to_json_value, topology_from_json
from skippy.config.files import _parse
from skippy.frontend.errors import ApiError
from skippy.frontend.schemas import parse_chat, parse_completion
from skippy.kv.statefile import StateFileError, name_of, parse_head, read_state
from skippy.models import (
    GGUFHeader,
    ModelError,
    Package,
    SliceInfo,
    cut_adapter,
    inspect_model,
    plan_slice,
    write_package,
)
from skippy.models.checkpoint import Conversion, Recipe
from skippy.models.checkpoint.folder import INDEX, TEXTS, WEIGHTS
from skippy.models.gguf import LazyArray
from skippy.models.manifest import MANIFEST
from skippy.protocol import (
    AdmissionAnswer,
    AdmissionRequest,
    AnnexedReplyDecoder,
    DialerHandshake,
    ListenerHandshake,
    LocalProtocolError,
    MessageDecoder,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    admit,
    encode_admission,
    encode_annex,
    encode_annexed_reply,
    encode_message,
    encode_reply,
    encode_transport_auth,
    estimated_wire_bytes,
)
from skippy.protocol.admission import decode_answer, decode_request
from skippy.protocol.errors import RemoteProtocolError

from . import CORPUS
from .machines import machines
from .stages import LOADED, REQUEST, TOKEN

STATE_IDENTITY: Final = bytes(range(32))
WIDTHS: Final = (0, 1, 2, 3, 4, 8, 16, 64, 128, 512, 2048, 4096)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    """``data`` whole when ``size`` is 0, else in pieces of that many bytes."""
    size = size or max(len(data), 1)
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _drain(
    decoder: MessageDecoder | ReplyDecoder, take: Callable[[], Any], data: bytes, size: int
) -> tuple[list[Any], str]:
    """Frames and the error's text ('' without one) after ``data`` and the end of the stream."""
    frames: list[Any] = []
    try:
        for piece in _pieces(data, size):
            decoder.receive_data(piece)
            while (frame := take()) is not None:
                frames.append(frame)
        decoder.receive_eof()
    except RemoteProtocolError as error:
        try:
            take()
        except RemoteProtocolError as again:
            assert again is error, "a dead decoder raises the error it died of"
        else:
            raise AssertionError("the decoder went on after an error") from error
        return frames, f"{error.kind}: {error}"
    return frames, ""


def frames(data: bytes) -> None:
    """Message frames. Byte 0 chooses the width, and with bit 7 heartbeats, byte 1 the size of the pieces."""
    choice = data[0] if data else 0
    n_embd, beats = WIDTHS[(choice & 0x7F) % len(WIDTHS)], choice > 0x7F
    size, data = (data[1] if len(data) > 1 else 0), data[2:]
    whole = MessageDecoder(n_embd, heartbeats=beats)
    messages, error = _drain(whole, whole.next_message, data, 0)
    encoded: list[bytes | None] = []
    for message in messages:
        try:
            parts = encode_message(message)
        except LocalProtocolError:  # a reader takes some frames that no writer makes
            encoded.append(None)
            continue
        wire = b"".join(parts)
        encoded.append(wire)
        assert len(wire) == estimated_wire_bytes(message)
        again = MessageDecoder(n_embd)
        again.receive_data(wire)
        decoded = again.next_message()
        assert decoded is not None
        assert b"".join(encode_message(decoded)) == wire
    if size:
        cut = MessageDecoder(n_embd, heartbeats=beats)
        others, other_error = _drain(cut, cut.next_message, data, size)
        assert other_error == error
        assert cut.peer_timeout_ms == whole.peer_timeout_ms
        assert len(others) == len(messages)
        for other, bytes_of in zip(others, encoded, strict=True):
            assert bytes_of is None or b"".join(encode_message(other)) == bytes_of


def replies(data: bytes) -> None:
    """Reply frames. Byte 0 is the size of the pieces that are compared, and with bit 7 allows heartbeats."""
    choice, data = (data[0] if data else 0), data[1:]
    size, beats = choice & 0x7F, choice > 0x7F
    whole = ReplyDecoder(heartbeats=beats)
    found, error = _drain(whole, whole.next_reply, data, 0)
    for reply in found:
        again = ReplyDecoder()
        again.receive_data(encode_reply(reply))
        assert again.next_reply() == reply
    if size:
        cut = ReplyDecoder(heartbeats=beats)
        assert _drain(cut, cut.next_reply, data, size) == (found, error)
        assert cut.peer_timeout_ms == whole.peer_timeout_ms


def annex(data: bytes) -> None:
    """Reply frames with annexes. Byte 0 as for plain replies."""
    choice, data = (data[0] if data else 0), data[1:]
    size, beats = choice & 0x7F, choice > 0x7F
    found, error, failure = _annexed(data, 0, beats)
    for reply, beside in found:
        wire = encode_reply(reply) if beside is None else encode_annexed_reply(reply, beside)
        assert _annexed(wire, 0, False) == ([(reply, beside)], "", None)
    if failure is not None:
        encode_annex(ReplyAnnex(failure=failure))
    if size:
        assert _annexed(data, size, beats) == (found, error, failure)


def _annexed(data: bytes, size: int, beats: bool) -> tuple[list[tuple[Reply, ReplyAnnex | None]], str, Any]:
    decoder = AnnexedReplyDecoder(heartbeats=beats)

    def take() -> tuple[Reply, ReplyAnnex | None] | None:
        reply = decoder.next_reply()
        return None if reply is None else (reply, decoder.annex)

    return *_drain(decoder, take, data, size), decoder.failure


def admission(data: bytes) -> None:
    """The JSON of both admission packets; what is taken can be sent again and is the same then."""
    packet: AdmissionRequest | AdmissionAnswer
    for decode in (decode_request, decode_answer):
        try:
            packet = decode(data)
        except RemoteProtocolError:
            continue
        try:
            wire = encode_admission(packet)
        except LocalProtocolError as error:
            assert "bytes" in str(error), "refused for more than its size"
            continue
        assert decode(wire[12:]) == packet
        if isinstance(packet, AdmissionRequest):
            assert decode_answer(encode_admission(admit(packet, LOADED))[12:]) == admit(packet, LOADED)


def handshake(data: bytes) -> None:
    """Both sides of the start of a connection. Byte 0 is the side and its settings, and the pieces' size."""
    choice, data = (data[0] if data else 0), data[1:]
    token = TOKEN if choice & 1 else None
    with_admission, allow_plain = bool(choice & 4), bool(choice & 8)
    side: DialerHandshake | ListenerHandshake
    if choice & 2:
        side = DialerHandshake(token, REQUEST if with_admission else None)
    else:
        side = ListenerHandshake(token, LOADED if with_admission else None, allow_plain=allow_plain)
    sent = side.data_to_send()
    with contextlib.suppress(RemoteProtocolError):
        for piece in _pieces(data, choice >> 4):
            if side.admitted:
                break
            side.receive_data(piece)
        if not side.admitted:
            side.receive_eof()
    sent += side.data_to_send()
    if isinstance(side, DialerHandshake):
        assert not (side.admitted and with_admission) or (side.answer is not None and side.answer.accepted)
        return
    if token is not None and not data.startswith(encode_transport_auth(TOKEN)):
        assert not side.admitted, "admitted without the token"
        assert not sent, "a stranger was told something"
    if side.admitted and with_admission and not allow_plain:
        assert side.request is not None
        assert admit(side.request, LOADED).accepted, "admitted although something differs"


def gguf(data: bytes) -> None:
    """A model file: header, what it says about itself, a plan for cutting it."""
    with tempfile.NamedTemporaryFile(dir=_scratch()) as file:
        file.write(data)
        file.flush()
        path = Path(file.name)
        try:
            header = GGUFHeader.read(path)
        except ModelError:
            return
        for entry in header.metadata.values():
            if isinstance(entry.value, LazyArray):
                with contextlib.suppress(ModelError):
                    sum(1 for _ in entry.value)
        for look in (
            lambda: SliceInfo.from_header(header),
            lambda: inspect_model(path),
            lambda: plan_slice(header, 0, 1),
            lambda: plan_slice(header, 1, 2).preamble(),
        ):
            with contextlib.suppress(ModelError):
                look()


def checkpoint(data: bytes) -> None:
    """A checkpoint's folder, converted: its files one after another, each with a number and a length."""
    with tempfile.TemporaryDirectory(dir=_scratch()) as name:
        folder, rest = Path(name), data
        while len(rest) > CHECKPOINT_ENTRY.size:
            index, length = CHECKPOINT_ENTRY.unpack_from(rest)
            rest = rest[CHECKPOINT_ENTRY.size :]
            (folder / CHECKPOINT_FILES[index % len(CHECKPOINT_FILES)]).write_bytes(rest[:length])
            rest = rest[length:]
        with contextlib.suppress(ModelError):
            conversion = Conversion.prepare(folder, Recipe())
            conversion.write_outline(folder / "outline.gguf")
            for tensor in GGUFHeader.read(folder / "outline.gguf").tensors.values():
                assert sum(map(len, conversion.data(tensor))) == tensor.nbytes


@functools.cache
def _package() -> dict[str, bytes]:
    """The files of a small package."""
    with tempfile.TemporaryDirectory(dir=_scratch()) as scratch:
        folder = write_package(CORPUS / "gguf" / "llama", Path(scratch) / "package").folder
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def package(data: bytes) -> None:
    """A layer package: its manifest, its metadata part or a layer's, by the first byte; then all of it."""
    with tempfile.TemporaryDirectory(dir=_scratch()) as scratch:
        folder = Path(scratch)
        for name, content in _package().items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        manifest = folder / MANIFEST
        choice, data = data[:1], data[1:]
        fed = {b"\1": "shared/metadata.gguf", b"\2": "layers/layer-00001.gguf"}.get(choice)
        if fed is None:
            manifest.write_bytes(data)
        else:  # of the right size, so that its content is looked at
            value = json.loads(manifest.read_bytes())
            for part in (value["shared"]["metadata"], value["layers"][1]):
                if part["path"] == fed:
                    part["artifact_bytes"] = max(1, len(data))
                    part["tensor_bytes"] = min(part["tensor_bytes"], part["artifact_bytes"])
            manifest.write_text(json.dumps(value))
            (folder / fed).write_bytes(data)
        with contextlib.suppress(ModelError):
            found = Package.open(folder)
            plan = plan_slice(found.header, 0, 2)
            found.locate(tensor.source for tensor in plan.tensors if tensor.source is not None)


@functools.cache
def _model() -> SliceInfo:
    return SliceInfo.from_file(CORPUS / "gguf" / "llama")


def adapter(data: bytes) -> None:
    """A LoRA adapter, cut for a model of two layers; what is taken can be read, and multiplied with."""
    with tempfile.TemporaryDirectory(dir=_scratch()) as scratch:
        path = Path(scratch) / "adapter.gguf"
        path.write_bytes(data)
        with contextlib.suppress(ModelError):
            part = cut_adapter(path, 1.0, _model(), cache_dir=scratch)
            if part.path is not None:
                kinds = {tensor.type_name for tensor in GGUFHeader.read(part.path).tensors.values()}
                assert kinds <= {"F32", "F16", "BF16", "Q8_0"}


def states(data: bytes) -> None:
    """A file that keeps a state: its head, then all of it under the name that its head gives it."""
    size = int.from_bytes(data[12:16], "little")
    head = None
    with contextlib.suppress(StateFileError):
        head = parse_head(data[:size])
        assert head.encode() == data[:size]
    with tempfile.NamedTemporaryFile(dir=_scratch(), buffering=0) as file:
        file.write(data)
        file.seek(0)
        assert isinstance(file.file, FileIO)
        try:
            state = read_state(file.file, name_of(data[:size]), STATE_IDENTITY)
        except StateFileError:
            return
        assert head is not None
        assert head.encode() + state == data


def _scratch() -> str | None:
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() else None


def config(data: bytes) -> None:
    """``stage.json``; what was accepted comes out of its own JSON form again."""
    _json(data, stage_config_from_json)


def topology(data: bytes) -> None:
    """``topology.json``."""
    _json(data, topology_from_json)


def _json(data: bytes, load: Callable[[bytes], Any]) -> None:
    try:
        value = load(data)
    except ConfigError:
        return
    assert load(data) == value
    assert _parse(data).keys() <= to_json_value(value).keys()


def chat(data: bytes) -> None:
    """The body of ``POST /v1/chat/completions``."""
    _body(data, parse_chat)


def completions(data: bytes) -> None:
    """The body of ``POST /v1/completions``."""
    _body(data, parse_completion)


def _body(data: bytes, parse: Callable[[bytes], Any]) -> None:
    try:
        parse(data)
    except ApiError as error:
        assert 400 <= error.status < 500
        assert error.message
        _ = str(error.envelope()).encode("utf-8", "surrogatepass")


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "frames": frames,
    "replies": replies,
    "annex": annex,
    "handshake": handshake,
    "admission": admission,
    "machines": machines,
    "gguf": gguf,
    "checkpoint": checkpoint,
    "package": package,
    "adapter": adapter,
    "states": states,
    "config": config,
    "topology": topology,
    "chat": chat,
    "completions": completions,
}
"""By name, for the command line and the corpus folders."""


CHECKPOINT_FILES: Final = (
    *TEXTS,
    WEIGHTS,
    INDEX,
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
CHECKPOINT_ENTRY: Final = struct.Struct("<BI")
"""How an input of ``checkpoint`` says which file follows, and how long it is."""

HEADS: Final = {"package": 1, "frames": 2, "replies": 1, "annex": 1, "handshake": 1}
"""Bytes at the start of an input that steer its target, where there are any."""

"""The start of a stage connection: credentials, if a token is configured, the ready word, and admission.

Sans-IO and incremental, both sides. A side that is given nothing to compare speaks plain generation 8, which
ends with the ready word. Source: ``docs/protocol.md``, sections "Handshake" and "Admission".
"""

from __future__ import annotations

import abc
import hmac
import struct
from typing import Final

from .admission import (
    ADMISSION_HEAD_BYTES,
    ADMISSION_WORD,
    AdmissionAnswer,
    AdmissionRequest,
    LoadedStage,
    Refusal,
    admission_length,
    admit,
    check_answer,
    decode_answer,
    decode_request,
    encode_admission,
    shorten,
)
from .errors import ErrorKind, LocalProtocolError, RemoteProtocolError
from .kinds import MAX_TRANSPORT_AUTH_BYTES, READY_MAGIC, TRANSPORT_AUTH_MAGIC
from .machines import Machine
from .states import HANDSHAKE, HandshakeEvent, HandshakeState

READY_WORD: Final = struct.pack("<i", READY_MAGIC)
_AUTH_WORD: Final = struct.pack("<i", TRANSPORT_AUTH_MAGIC)
_AUTH_HEAD_BYTES: Final = 5


def encode_transport_auth(token: bytes) -> bytes:
    """The preamble that carries ``token``: magic, one length byte, the token.

    Raises:
        LocalProtocolError: (InvalidInput) the token is empty or longer than 64 bytes.
    """
    if not 1 <= len(token) <= MAX_TRANSPORT_AUTH_BYTES:
        raise LocalProtocolError(
            f"a transport token has 1 to {MAX_TRANSPORT_AUTH_BYTES} bytes, not {len(token)}"
        )
    return _AUTH_WORD + bytes((len(token),)) + token


class _Handshake(Machine[HandshakeState, HandshakeEvent], abc.ABC):
    def __init__(self, name: str, start: HandshakeState) -> None:
        super().__init__(name, HANDSHAKE, start)
        self._received = bytearray()
        self._to_send = b""
        self._extensions: tuple[str, ...] = ()
        self._wanted = 0
        self._error: RemoteProtocolError | None = None

    @property
    def admitted(self) -> bool:
        """Done: frames may flow, once ``data_to_send()`` was sent."""
        return self._state is HandshakeState.ADMITTED

    @property
    def trailing_data(self) -> bytes:
        """Bytes received behind the handshake: the first ones of the frames. LocalProtocolError before."""
        if not self.admitted:
            raise LocalProtocolError(f"{self._name} is {self._state.value}: no frames yet")
        return bytes(self._received)

    def data_to_send(self) -> bytes:
        """What has to be sent now, also after a refusal; b"" when nothing. Each byte is given once."""
        data, self._to_send = self._to_send, b""
        return data

    @property
    def awaits_admission(self) -> bool:
        """The ready word has passed (or is in ``data_to_send``), the peer's admission packet has not."""
        return self._state is HandshakeState.AWAIT_ADMISSION

    @property
    def extensions(self) -> tuple[str, ...]:
        """What both sides agreed on; empty for a plain peer. LocalProtocolError before admission."""
        if not self.admitted:
            raise LocalProtocolError(f"{self._name} is {self._state.value}: nothing is agreed yet")
        return self._extensions

    def receive_data(self, data: bytes | bytearray | memoryview) -> bool:
        """Feed bytes as they arrive. Returns ``admitted``; anything behind the handshake is kept.

        Raises:
            RemoteProtocolError: the peer's bytes are wrong. Close the connection; further calls raise it too.
            LocalProtocolError: called after admission, when bytes belong to the decoder.
        """
        if self._error is not None:
            raise self._error
        if self._state in (HandshakeState.ADMITTED, HandshakeState.CLOSED):
            raise LocalProtocolError(f"{self._name} is {self._state.value}: it takes no more bytes")
        self._received += data
        try:
            self._parse()
        except RemoteProtocolError as error:
            self._fail(error)
            raise
        return self.admitted

    def receive_eof(self) -> None:
        """The stream ended. RemoteProtocolError (UnexpectedEof) unless admitted."""
        if self._error is not None:
            raise self._error
        if not self.admitted:
            error = RemoteProtocolError("stream ended during the handshake", ErrorKind.UNEXPECTED_EOF)
            self._fail(error)
            raise error

    def _fail(self, error: RemoteProtocolError) -> None:
        self._error = error
        self._local(HandshakeEvent.CLOSE)

    @abc.abstractmethod
    def _parse(self) -> None:
        """Take what has arrived of the peer's part."""

    def _packet(self) -> bytes | None:
        """Take the body of the peer's admission packet, once it has arrived whole."""
        length = admission_length(self._received)
        self._wanted = ADMISSION_HEAD_BYTES if length is None else ADMISSION_HEAD_BYTES + length
        if len(self._received) < self._wanted:
            return None
        body = bytes(self._received[ADMISSION_HEAD_BYTES : self._wanted])
        del self._received[: self._wanted]
        return body


class DialerHandshake(_Handshake):
    """The connecting side: sends the preamble if there is a token, awaits the ready word, asks for admission.

    Args:
        token: 1 to 64 bytes; None sends no preamble (the listener must then have no token either).
        request: what to ask for; None ends with the ready word, as plain generation 8 does.

    Raises:
        LocalProtocolError: a token or a request that cannot be sent.
    """

    def __init__(self, token: bytes | None, request: AdmissionRequest | None = None) -> None:
        super().__init__("dialer handshake", HandshakeState.AWAIT_READY)
        self._request = request
        self._packet_to_send = b"" if request is None else encode_admission(request)
        self._wanted = len(READY_WORD)
        self.answer: AdmissionAnswer | None = None
        """The listener's answer, once it has come."""
        if token is not None:
            self._to_send = encode_transport_auth(token)

    def _parse(self) -> None:
        if self._state is HandshakeState.AWAIT_READY:
            self._take_ready()
        if self._state is not HandshakeState.AWAIT_ADMISSION:
            return
        assert self._request is not None
        body = self._packet()
        if body is None:
            return
        self.answer = decode_answer(body)
        check_answer(self._request, self.answer)
        self._extensions = self.answer.extensions
        self._remote(HandshakeEvent.ADMISSION_AGREED)

    @property
    def bytes_wanted(self) -> int:
        """How many more bytes belong to the handshake for sure: read no more and none is left over."""
        return self._wanted - len(self._received)

    def _take_ready(self) -> None:
        if len(self._received) < len(READY_WORD):
            return
        if self._received[: len(READY_WORD)] != READY_WORD:
            raise RemoteProtocolError(
                f"not a stage: the first bytes are {self._received[:4].hex()}, "
                f"not the ready word {READY_WORD.hex()}"
            )
        del self._received[: len(READY_WORD)]
        if self._request is None:
            self._remote(HandshakeEvent.READY_RECEIVED_PLAIN)
        else:
            self._remote(HandshakeEvent.READY_RECEIVED)
            self._to_send += self._packet_to_send


class ListenerHandshake(_Handshake):
    """The accepting side: checks the preamble if there is a token, sends the ready word, answers the request.

    Nothing is sent, and nothing but the preamble is looked at, before the token was shown. After a refusal
    ``data_to_send`` holds the answer that says why.

    Args:
        token: what the dialer must present; None reads nothing and is ready at once. An empty token matches
            nothing, so everybody is refused.
        loaded: what to compare requests with; None ends with the ready word, as plain generation 8 does.
        allow_plain: admit a peer whose first bytes are a frame instead of an admission packet.
    """

    def __init__(
        self, token: bytes | None, loaded: LoadedStage | None = None, *, allow_plain: bool = False
    ) -> None:
        super().__init__(
            "listener handshake", HandshakeState.OWE_READY if token is None else HandshakeState.AWAIT_AUTH
        )
        self._token = token
        self._loaded = loaded
        self._allow_plain = allow_plain
        self.request: AdmissionRequest | None = None
        """The dialer's request, once it has come; None for a plain peer."""
        self._refusal: Refusal | None = None
        self.authenticated = False
        """The peer showed the token, or needs none: the ready word is owed or sent, whatever came then."""
        if token is None:
            self._send_ready()

    def refuse(self, field: str, expected: str, found: str) -> None:
        """Whatever the peer will ask for, refuse it for this reason. A plain peer is not told."""
        self._refusal = Refusal(field, shorten(expected), shorten(found))

    def _send_ready(self) -> None:
        self.authenticated = True
        self._to_send = READY_WORD
        plain = self._loaded is None
        self._local(HandshakeEvent.READY_SENT_PLAIN if plain else HandshakeEvent.READY_SENT)

    def _parse(self) -> None:
        if self._state is HandshakeState.AWAIT_AUTH:
            self._take_token()
        if self._state is HandshakeState.AWAIT_ADMISSION and self._received:
            self._take_request()

    def _take_token(self) -> None:
        received = self._received
        assert self._token is not None
        if len(received) >= len(_AUTH_WORD) and received[: len(_AUTH_WORD)] != _AUTH_WORD:
            raise RemoteProtocolError(f"no credentials: the connection starts with {received[:4].hex()}")
        if len(received) < _AUTH_HEAD_BYTES:
            return
        length = received[_AUTH_HEAD_BYTES - 1]
        if not 1 <= length <= MAX_TRANSPORT_AUTH_BYTES:
            raise RemoteProtocolError(
                f"transport token of {length} bytes; 1 to {MAX_TRANSPORT_AUTH_BYTES} are allowed"
            )
        end = _AUTH_HEAD_BYTES + length
        if len(received) < end:
            return
        if not hmac.compare_digest(bytes(received[_AUTH_HEAD_BYTES:end]), self._token):
            raise RemoteProtocolError("wrong transport token")
        del received[:end]
        self._remote(HandshakeEvent.AUTH_ACCEPTED)
        self._send_ready()

    def _take_request(self) -> None:
        if len(self._received) < len(ADMISSION_WORD):
            return
        if self._received[: len(ADMISSION_WORD)] != ADMISSION_WORD:
            self._meet_plain_peer()
            return
        try:
            body = self._packet()
            if body is None:
                return
            self.request = decode_request(body)
        except RemoteProtocolError as error:
            self._send_answer(
                AdmissionAnswer(refusal=Refusal("packet", "a sound admission request", str(error)))
            )
            raise
        assert self._loaded is not None
        refusal = self._refusal
        answer = admit(self.request, self._loaded) if refusal is None else AdmissionAnswer(refusal=refusal)
        self._send_answer(answer)
        if answer.refusal is not None:
            sender = f"stage {self.request.sender_index} ({self.request.sender_id[:80]!r})"
            raise RemoteProtocolError(f"{sender} is not admitted: {answer.refusal}")
        self._extensions = answer.extensions
        self._remote(HandshakeEvent.ADMISSION_AGREED)

    def _send_answer(self, answer: AdmissionAnswer) -> None:
        self._to_send += encode_admission(answer)

    def _meet_plain_peer(self) -> None:
        word = bytes(self._received[: len(_AUTH_WORD)])
        if word == _AUTH_WORD:
            raise RemoteProtocolError("the peer shows a link token, but this side asks for none")
        if not self._allow_plain:
            raise RemoteProtocolError(
                f"older or incomplete peer: it sent no admission packet, but starts with {word.hex()}"
            )
        self._remote(HandshakeEvent.FRAME_RECEIVED)

"""The start of a stage connection: credentials, if a token is configured, then the ready word.

Sans-IO and incremental, both sides. Source: ``docs/protocol.md``, section "Handshake".
"""

from __future__ import annotations

import abc
import hmac
import struct
from typing import Final

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
        """What has to be sent now; b"" when nothing. Each byte is given once."""
        data, self._to_send = self._to_send, b""
        return data

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


class DialerHandshake(_Handshake):
    """The connecting side: sends the preamble if there is a token, then waits for the ready word.

    Args:
        token: 1 to 64 bytes; None sends no preamble (the listener must then have no token either).
    """

    def __init__(self, token: bytes | None) -> None:
        super().__init__("dialer handshake", HandshakeState.AWAIT_READY)
        if token is not None:
            self._to_send = encode_transport_auth(token)

    def _parse(self) -> None:
        if len(self._received) < len(READY_WORD):
            return
        if self._received[: len(READY_WORD)] != READY_WORD:
            raise RemoteProtocolError(
                f"not a stage: the first bytes are {self._received[:4].hex()}, "
                f"not the ready word {READY_WORD.hex()}"
            )
        del self._received[: len(READY_WORD)]
        self._remote(HandshakeEvent.READY_RECEIVED)


class ListenerHandshake(_Handshake):
    """The accepting side: checks the preamble if there is a token, then sends the ready word.

    Args:
        token: what the dialer must present; None reads nothing and is ready at once. An empty token matches
            nothing, so everybody is refused.
    """

    def __init__(self, token: bytes | None) -> None:
        super().__init__(
            "listener handshake", HandshakeState.OWE_READY if token is None else HandshakeState.AWAIT_AUTH
        )
        self._token = token
        if token is None:
            self._send_ready()

    def _send_ready(self) -> None:
        self._to_send = READY_WORD
        self._local(HandshakeEvent.READY_SENT)

    def _parse(self) -> None:
        received = self._received
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
        if not hmac.compare_digest(bytes(received[_AUTH_HEAD_BYTES:end]), self._token or b""):
            raise RemoteProtocolError("wrong transport token")
        del received[:end]
        self._remote(HandshakeEvent.AUTH_ACCEPTED)
        self._send_ready()

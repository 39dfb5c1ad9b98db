"""Links inside TLS, over any other transport: encryption, and with a CA of the chain's own, mutual proof.

TLS runs on memory buffers here (:class:`ssl.SSLObject`), so that received plain text goes straight into the
caller's buffer.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence

import attrs
import trio

from skippy.config import ConfigError, Endpoint, StageOptions
from skippy.protocol import Buffer

from .base import Link, LinkClosed, Listener, Transport
from .layers import LayeredListener

_FLUSH_BYTES = 256 * 1024
"""Plain text that is encrypted before it is sent: bounds the copy that encryption needs."""
_RECEIVE_BYTES = 64 * 1024


@attrs.frozen(slots=True, kw_only=True)
class TlsFiles:
    """PEM files. ``cert`` (with its chain) and ``key`` are this stage's; ``ca`` signs those of its peers."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None

    @classmethod
    def of(cls, options: StageOptions) -> TlsFiles:
        return cls(cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca)

    def check(self) -> None:
        """Raise ConfigError for files that cannot be used: now, not at the first connection."""
        if self.cert is not None:
            self.server_context()
        if self.ca is not None:
            self.client_context()

    def server_context(self) -> ssl.SSLContext:
        """For accepted links; with a CA, the peer must show a certificate of it. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.cert is None:
            raise ConfigError("tls_cert: is missing; listening with TLS needs a certificate and its key")
        self._load(context)
        # Nothing resumes sessions, and a ticket that the peer never reads turns its closing into a reset.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_RENEGOTIATION
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """For dialled links; the peer's certificate is of the CA, or a public one. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is None:
            context.load_default_certs()
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        if self.cert is not None:
            with _naming("tls_cert", self.cert), open(self.cert, "rb"):
                pass
            with _naming("tls_key", str(self.key)), open(str(self.key), "rb"):
                pass
            with _naming("tls_cert", f"{self.cert} with key {self.key}"):
                # The callback keeps OpenSSL from asking the terminal for a password.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
        if self.ca is not None:
            with _naming("tls_ca", self.ca):
                context.load_verify_locations(self.ca)


@contextlib.contextmanager
def _naming(option: str, files: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as exc:
        raise ConfigError(f"{option}: {files}: {_reason(exc)}") from None
    except OSError as exc:
        raise ConfigError(f"{option}: {files}: {exc.strerror}") from None


class TlsLink(Link):
    """TLS over ``inner``, which it owns."""

    def __init__(self, inner: Link, context: ssl.SSLContext, server_name: str | None) -> None:
        self._inner = inner
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._handshaking = trio.Lock()
        self._ready = False
        self._sending = False
        self._closed = False

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def handshake(self) -> None:
        if self._ready:
            return
        async with self._handshaking:
            if not self._ready:
                await self._inner.handshake()
                await self._shake_hands()
                self._ready = True

    async def _shake_hands(self) -> None:
        with self._errors("the TLS handshake with"):
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
                except ssl.SSLError:
                    with contextlib.suppress(LinkClosed):  # the alert, which tells the peer why
                        self._inner.send_nowait([self._outgoing.read()])
                    raise
                else:
                    await self._flush()
                    return

    async def send(self, buffers: Sequence[Buffer]) -> None:
        await self.handshake()
        self._sending = True  # stays so after a failure: nothing may follow half a record
        with self._errors("sending to"):
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                for start in range(0, view.nbytes, _FLUSH_BYTES):
                    self._tls.write(view[start : start + _FLUSH_BYTES])
                    if self._outgoing.pending >= _FLUSH_BYTES:
                        await self._flush()
            await self._flush()
        self._sending = False

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """Takes nothing: what is encrypted must be sent, and the system need not take all of it."""
        return [memoryview(buffer).cast("B") for buffer in buffers]

    async def receive_into(self, buffer: memoryview) -> int:
        await self.handshake()
        with self._errors("receiving from"):
            while True:
                if self._closed:
                    raise LinkClosed(f"receiving from {self.peer} failed: the link is closed")
                try:
                    return self._tls.read(buffer.nbytes, buffer)  # type: ignore[return-value]
                except ssl.SSLWantReadError:
                    # An answer to a key update may be in the outgoing buffer; it leaves with the next send.
                    await self._fill()
                except ssl.SSLZeroReturnError:
                    return 0

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._inner.send([self._outgoing.read()])

    async def _fill(self) -> None:
        count = await self._inner.receive_into(self._buffer)
        if count:
            self._incoming.write(self._buffer[:count])
        else:
            self._incoming.write_eof()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except ssl.SSLError as exc:
            raise LinkClosed(f"{what} {self.peer} failed: {_reason(exc)}") from exc

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ready and not self._sending:
            # Says that the end is meant; whether the peer still hears it is not waited for.
            with contextlib.suppress(ssl.SSLError, LinkClosed):
                with contextlib.suppress(ssl.SSLWantReadError):
                    self._tls.unwrap()
                self._inner.send_nowait([self._outgoing.read()])
        self._inner.close()


class TlsTransport(Transport):
    """TLS over the links of ``inner``. Files are read here and never again.

    Raises:
        ConfigError: a file cannot be used; from ``listen`` and ``adopt``: there is no certificate.
    """

    def __init__(self, inner: Transport, files: TlsFiles) -> None:
        self._inner = inner
        self._files = files
        self._server = files.server_context() if files.cert is not None else None
        # Reading the system's CAs takes a tenth of a second, so not for those who never dial.
        self._client = None if files == TlsFiles() else files.client_context()

    async def listen(self, endpoint: Endpoint) -> Listener:
        accept = self._acceptor()
        inner = await self._inner.listen(endpoint.with_scheme("tcp"))
        return LayeredListener(inner, "tls", accept)

    def adopt(self, sock: socket.socket, scheme: str) -> Listener:
        return LayeredListener(self._inner.adopt(sock, "tcp"), "tls", self._acceptor())

    def _acceptor(self) -> Callable[[Link], Link]:
        context = self._server or self._files.server_context()  # which raises
        return lambda link: TlsLink(link, context, None)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        self._client = context = self._client or self._files.client_context()
        link = await self._inner.connect(endpoint.with_scheme("tcp"), source_host=source_host)
        return TlsLink(link, context, endpoint.host.partition("%")[0])


def _reason(exc: ssl.SSLError) -> str:
    """What went wrong, in words; OpenSSL's names are kept where they are the only ones."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {exc.verify_message}"
    if isinstance(exc, ssl.SSLEOFError):
        return "the connection was cut off"
    if exc.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"):
        return "what it sends is not TLS"
    return (exc.reason or str(exc)).replace("_", " ").lower()

"""TLS links: who is let in, who is not, and what both are told."""

from __future__ import annotations

import random
import ssl

import pytest
import trio
from cryptography.hazmat.primitives import serialization

from skippy.config import ConfigError, Endpoint
from skippy.stage.links import Link, LinkClosed, TcpTransport, TlsFiles, TlsTransport
from skippy.stage.links.tls import TlsLink
from tests.support.certificates import Certificates

ANY = Endpoint("127.0.0.1", 0, "tls")


async def meet(listening: TlsFiles, dialling: TlsFiles | None) -> tuple[str, str]:
    """Connect, shake hands on both sides and exchange a word; what each side says: "ok" or its error.

    Args:
        dialling: None: the dialler speaks plain TCP.
    """
    said = {}

    async def side(name: str, link: Link) -> None:
        try:
            await link.handshake()
            await link.send([b"hello"])
            count = await link.receive_into(memoryview(bytearray(5)))
            said[name] = "ok" if count == 5 else f"{count} bytes"
        except LinkClosed as exc:
            said[name] = str(exc)
            link.close()

    with trio.fail_after(10):
        listener = await TlsTransport(TcpTransport(), listening).listen(ANY)
        if dialling is None:
            near = await TcpTransport().connect(listener.endpoint)
        else:
            near = await TlsTransport(TcpTransport(), dialling).connect(listener.endpoint)
        far = await listener.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side, "near", near)
            nursery.start_soon(side, "far", far)
        for thing in (near, far, listener):
            thing.close()
    return said["near"], said["far"]


async def test_stages_of_one_ca_trust_each_other(certificates: Certificates) -> None:
    assert await meet(certificates.files(), certificates.files()) == ("ok", "ok")


async def test_without_a_ca_anyone_may_connect(certificates: Certificates) -> None:
    assert await meet(certificates.files(ca=None), certificates.files(cert=None)) == ("ok", "ok")


async def test_a_peer_without_a_certificate_is_refused_and_told(certificates: Certificates) -> None:
    near, far = await meet(certificates.files(), certificates.files(cert=None))
    assert far.startswith("the TLS handshake with 127.0.0.1:")
    assert far.endswith("failed: peer did not return a certificate")
    assert "certificate required" in near


async def test_a_certificate_of_a_stranger_is_refused_on_either_side(certificates: Certificates) -> None:
    _, far = await meet(certificates.files(), certificates.files(cert="stranger"))
    assert "its certificate is not accepted: unable to get local issuer certificate" in far
    near, _ = await meet(certificates.files(cert="stranger"), certificates.files())
    assert "its certificate is not accepted: unable to get local issuer certificate" in near
    near, _ = await meet(certificates.files(ca=None), TlsFiles())  # not a public one either
    assert "its certificate is not accepted" in near


async def test_a_certificate_of_another_host_is_refused(certificates: Certificates) -> None:
    with trio.fail_after(10):
        listener = await TlsTransport(TcpTransport(), certificates.files()).listen(ANY)
        tcp = await TcpTransport().connect(listener.endpoint)
        near = TlsLink(tcp, certificates.files().client_context(), "elsewhere.example")
        far = await listener.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, far, "alert bad certificate")
            await refused(near, "Hostname mismatch")
        listener.close()


async def refused(link: Link, text: str) -> None:
    with pytest.raises(LinkClosed, match=text):
        await link.handshake()
    link.close()


async def test_a_plain_peer_is_refused(certificates: Certificates) -> None:
    _, far = await meet(certificates.files(), None)
    assert far.endswith("failed: what it sends is not TLS")


async def test_a_plain_listener_is_no_tls_peer(certificates: Certificates) -> None:
    with trio.fail_after(10):
        listener = await TcpTransport().listen(Endpoint("127.0.0.1", 0))
        near = await TlsTransport(TcpTransport(), certificates.files()).connect(listener.endpoint)
        far = await listener.accept()
        await far.send([b"\x59\x44\x52\x53 is no TLS record"])
        await refused(near, "what it sends is not TLS")
        far.close()
        listener.close()


async def test_random_bytes_end_a_link_and_nothing_else(certificates: Certificates) -> None:
    dice = random.Random(5)
    transport = TlsTransport(TcpTransport(), certificates.files())
    with trio.fail_after(10):
        listener = await transport.listen(ANY)
        for _ in range(60):
            near = await TcpTransport().connect(listener.endpoint)
            await near.send([b"\x16\x03\x01" * dice.randrange(2), dice.randbytes(dice.randrange(1, 200))])
            near.close()
            await refused(await listener.accept(), "the TLS handshake with 127.0.0.1:")
        listener.close()


async def test_an_end_that_is_not_meant_is_not_an_end_of_stream(certificates: Certificates) -> None:
    """Who cuts the connection below TLS must not pass for the peer."""
    transport = TlsTransport(TcpTransport(), certificates.files())
    with trio.fail_after(10):
        listener = await transport.listen(ANY)
        near = await transport.connect(listener.endpoint)
        far = await listener.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.handshake)
            await far.handshake()
        near._inner.close()  # type: ignore[attr-defined]
        with pytest.raises(LinkClosed, match="cut off"):
            await far.receive_into(memoryview(bytearray(1)))
        for thing in (near, far, listener):
            thing.close()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("cert", "tls_cert: .*no-such.pem: No such file"),
        ("key", "tls_key: .*no-such.pem: No such file"),
        ("ca", "tls_ca: .*no-such.pem: No such file"),
    ],
)
def test_a_missing_file_is_named(certificates: Certificates, option: str, text: str) -> None:
    good = {name: getattr(certificates.files(), name) for name in ("cert", "key", "ca")}
    with pytest.raises(ConfigError, match=text):
        TlsFiles(**good | {option: str(certificates.folder / "no-such.pem")}).check()


def test_files_that_do_not_belong_together_are_named(certificates: Certificates) -> None:
    mixed = TlsFiles(cert=certificates.files().cert, key=certificates.files(cert="stranger").key)
    with pytest.raises(ConfigError, match=r"tls_cert: .*chain.pem with key .*: key values mismatch"):
        mixed.check()
    with pytest.raises(ConfigError, match=r"tls_ca: .*chain-key.pem: no certificate or crl found"):
        TlsFiles(ca=certificates.files().key).check()


def test_a_key_with_a_password_is_an_error_and_asks_nobody(certificates: Certificates) -> None:
    key = serialization.load_pem_private_key((certificates.folder / "chain-key.pem").read_bytes(), None)
    locked = certificates.folder / "locked-key.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="tls_cert: .*locked-key.pem: "):
        TlsFiles(cert=certificates.files().cert, key=str(locked)).check()


def test_old_versions_of_tls_are_not_spoken(certificates: Certificates) -> None:
    for context in (certificates.files().server_context(), certificates.files().client_context()):
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2

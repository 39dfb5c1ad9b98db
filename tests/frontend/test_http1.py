"""Bytes that are no HTTP request, and offers of other protocols."""

from __future__ import annotations

import json
import uuid

import pytest
import trio

from .support import ScriptedGenerator, client, completion_body, say


async def exchange(sent: bytes, *, half_close: bool = False) -> tuple[bytes, bytes, bytes]:
    """Status line, the other head lines, and body of the answer; the server must close the connection."""
    async with client(ScriptedGenerator(say("x"))) as http:
        stream = await trio.open_tcp_stream(http.base_url.host, http.base_url.port or 0)
        async with stream:
            await stream.send_all(sent)
            if half_close:
                await stream.send_eof()
            answer = bytearray()
            async for chunk in stream:
                answer += chunk
        assert (await http.get("/health")).status_code == 200
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status, _, headers = head.partition(b"\r\n")
    return status, headers.lower(), body


async def test_http_1_0_needs_no_host() -> None:
    """Health checks of some proxies send none, and no browser leaves it out."""
    line, _, body = await exchange(b"GET /health HTTP/1.0\r\n\r\n")
    assert (line, body) == (b"HTTP/1.1 200 ", b'{"status":"ok"}')


_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize("path", [b"/v1/nowhere", b"/v1/models", b"/live"])
async def test_an_answer_that_does_not_wait_for_a_body_ends_the_connection_and_says_so(path: bytes) -> None:
    """Else a client that keeps its connections sends its next request on one that is about to be closed."""
    sent = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n" % path
    line, headers, _ = await exchange(sent)
    assert line[:10] == b"HTTP/1.1 4"
    assert b"\r\nconnection: close" in headers


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "not valid HTTP/1.1"),
        (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, "not valid HTTP/1.1"),
        (_POST + b"content-length: -1\r\n\r\n", 400, "Content-Length"),
        (_POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", 400, "Content-Length"),
        (
            _POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            400,
            "both Content-Length and Transfer-Encoding",
        ),
        (_POST + b"origin: http://localhost\r\nOrigin: http://evil.example\r\n\r\n", 400, "origin is given"),
        (_POST + b"authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400, "authorization is"),
        (_POST + b"transfer-encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
        (_POST + b"transfer-encoding: chunked\r\n\r\nZZ\r\n", 400, "chunk"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000, 431, "larger than"),
    ],
)
async def test_what_is_no_http_gets_the_envelope(sent: bytes, status: int, words: str) -> None:
    line, headers, body = await exchange(sent)
    assert line.startswith(f"HTTP/1.1 {status} ".encode())
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert words in error["message"]
    assert b"content-type: application/json" in headers
    assert b"connection: close" in headers
    assert uuid.UUID(headers.partition(b"x-request-id: ")[2].split(b"\r\n")[0].decode())


async def test_a_body_that_ends_early() -> None:
    line, _, body = await exchange(_POST + b"content-length: 50\r\n\r\n{", half_close=True)
    assert line.startswith(b"HTTP/1.1 400 ")
    assert "not valid HTTP/1.1" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "offer",
    [
        b"connection: upgrade, http2-settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
        b"connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_offers_of_other_protocols_are_ignored(method: str, offer: bytes) -> None:
    if method == "GET":
        line, _, body = await exchange(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n")
        assert json.loads(body) == {"status": "ok"}
    else:
        asked = json.dumps(completion_body([1])).encode()
        length = f"content-length: {len(asked)}\r\n\r\n".encode()
        line, _, body = await exchange(_POST + offer + length + asked)
        assert json.loads(body)["choices"][0]["text"] == "x"
    assert line.startswith(b"HTTP/1.1 200 ")


async def test_http2_without_tls_is_refused() -> None:
    line, _, body = await exchange(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert not line.startswith(b"HTTP/1.1 2")
    assert b'"error"' in body


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost", 200),
        ("HTTP://127.0.0.1:80", 200),
        ("http://evil.example", 403),
        ("ftp://localhost@evil.example", 403),
    ],
)
async def test_a_target_that_names_the_server_counts_as_its_host(target: str, status: int) -> None:
    sent = f"GET {target}/health?x=1 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    line, _, body = await exchange(sent.encode())
    assert line.startswith(f"HTTP/1.1 {status} ".encode())
    assert status != 403 or json.loads(body)["error"]["code"] == "host_not_allowed"


_OFFER = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
_KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize(
    "offer", [_KEY + b"sec-websocket-version: 12\r\n", b"sec-websocket-version: 13\r\n", _KEY]
)
async def test_a_handshake_that_is_none_is_a_plain_request(offer: bytes) -> None:
    line, headers, body = await exchange(_OFFER + b"connection: close\r\n" + offer + b"\r\n")
    assert line.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"]
    assert b"x-request-id: " in headers


async def test_a_websocket_has_a_request_id() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        stream = await trio.open_tcp_stream(http.base_url.host, http.base_url.port or 0)
        async with stream:
            await stream.send_all(_OFFER + _KEY + b"sec-websocket-version: 13\r\n\r\n")
            head = bytearray()
            while b"\r\n\r\n" not in head:
                head += await stream.receive_some()
    assert head.startswith(b"HTTP/1.1 101 ")
    assert head.lower().count(b"x-request-id: ") == 1

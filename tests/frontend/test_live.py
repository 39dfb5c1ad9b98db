"""The WebSocket ``/live``: what it tells, whom it refuses, and whom it drops."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio_websocket import (
    ConnectionClosed,
    ConnectionRejected,
    WebSocketConnection,
    open_websocket_url,
)

from skippy.config import AccessOptions
from skippy.frontend.live import MAX_WATCHERS, WAITING_SNAPSHOTS, LiveFeed
from skippy.frontend.options import FrontendOptions
from skippy.frontend.status import ChainStatus, stage_times

from .support import ScriptedGenerator, say, serving
from .test_inside import chain, completion_body

KEYS = ("sk-first", "sk-second")


def key_protocol(key: str) -> str:
    return "skippy.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


@contextlib.asynccontextmanager
async def watching(url: str, **arguments: Any) -> AsyncIterator[WebSocketConnection]:
    async with open_websocket_url(url.replace("http:", "ws:") + "/live", **arguments) as socket:
        yield socket


async def read_on(socket: WebSocketConnection) -> int:
    """The code with which the socket is closed in the end; 1006 where it just ends."""
    try:
        while True:
            await socket.get_message()
    except ConnectionClosed as closed:
        return 1006 if closed.reason is None else int(closed.reason.code)


async def refusal(url: str, **arguments: Any) -> ConnectionRejected:
    """How a handshake is refused."""
    try:
        async with watching(url, **arguments):
            pass
    except ConnectionRejected as refused:
        return refused
    raise AssertionError("the handshake was not refused")


async def test_what_a_chain_is_doing() -> None:
    async with chain() as (http, _, generator), trio.open_nursery() as nursery:
        body = completion_body("hello, hello, hello", max_tokens=3000, temperature=0, ignore_eos=True)

        async def ask() -> None:
            await http.post("/v1/completions", json=body)

        async with watching(str(http.base_url).rstrip("/")) as socket:
            first = json.loads(await socket.get_message())
            assert first["object"] == "chain.status"
            assert [(s["layer_start"], s["layer_end"]) for s in first["stages"]] == [(0, 2), (2, 4), (4, 6)]
            assert [lane["state"] for lane in first["lanes"]] == ["idle", "idle"]
            assert (first["tokens_per_second"], first["last"], first["hops"]) == (0, None, None)
            nursery.start_soon(ask)
            while not (now := json.loads(await socket.get_message()))["tokens_per_second"]:
                pass
        assert now["running"] == 1
        assert now["totals"]["requests"] == 1
        assert "hello" not in json.dumps(now)
        nursery.cancel_scope.cancel()
    assert generator.status().last is not None


async def test_what_a_prompt_took_each_stage() -> None:
    """Asked for while somebody watches, once for each request, and never ahead of those who wait."""
    async with chain() as (http, pool, generator):
        body = completion_body("the quick brown fox jumps over", max_tokens=4, temperature=0, ignore_eos=True)
        answer = await http.post("/v1/completions", json=body)
        prompt = answer.json()["usage"]["prompt_tokens"]
        while pool.idle_lanes < 2:
            await trio.lowlevel.checkpoint()
        assert generator.status().times == []
        async with watching(str(http.base_url).rstrip("/")) as socket:
            times = json.loads(await socket.get_message())["times"]
        assert [one["index"] for one in times] == [0, 1, 2]
        for one in times:
            assert (one["chunks"], one["tokens"]) == (4, prompt - 1)  # in chunks of 8
            assert one["compute_ms"] > 0
        assert [one["bytes"] > 0 for one in times] == [True, True, False]
        assert generator.status().totals.requests == 1  # the question is none
        while pool.idle_lanes < 2:
            await trio.lowlevel.checkpoint()
        asked: list[None] = []
        generator._cache.prompt_times = lambda: asked.append(None)  # type: ignore
        await generator.time_stages()
        assert asked == []


def test_times_of_another_request_and_nonsense_are_left_out() -> None:
    prompt = {
        "request_id": 5, "chunks": 1, "tokens": 8, "compute_us": 1500, "write_us": 0, "wait_us": 0,
        "activation_bytes": 0,
    }  # fmt: skip
    reports: list[Any] = [
        {"stage_index": 0, "prompt": prompt},
        {"stage_index": 1, "prompt": {**prompt, "request_id": 6}},
        {"stage_index": 2, "prompt": None},
        {"stage_index": 3, "prompt": {**prompt, "compute_us": "x"}},
        {"stage_index": "x", "prompt": prompt},
        {},
        5,
        {"stage_index": 4, "prompt": prompt},
    ]
    assert [(times.index, times.compute_ms) for times in stage_times(reports)] == [(0, 1.5), (4, 1.5)]
    assert stage_times([{"stage_index": 0, "prompt": None}]) == []


async def test_where_the_last_requests_time_went() -> None:
    async with chain() as (http, pool, generator):
        body = completion_body("the quick brown fox jumps over", max_tokens=4, temperature=0, ignore_eos=True)
        answer = await http.post("/v1/completions", json=body)
        while pool.idle_lanes < 2:
            await trio.lowlevel.checkpoint()
        status = generator.status()
    assert status.last is not None
    assert status.last.request_id == answer.headers["x-request-id"]
    assert (status.last.generated_tokens, status.last.cached_tokens) == (4, 0)
    assert status.last.first_token_ms >= status.last.prefill_ms > 0
    assert status.hops is not None
    assert status.hops.compute_stage in (0, 1, 2)
    assert status.hops.edge_stage in (0, 1)
    assert status.hops.edge_bytes > 0


# -- who may watch -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://127.0.0.1"}, "origin_not_allowed"),
        ({"host": "rebound.example"}, "host_not_allowed"),
        ({"host": "rebound.example", "origin": "http://rebound.example"}, "host_not_allowed"),
    ],
)
async def test_pages_of_others_cannot_watch(headers: dict[str, str], code: str) -> None:
    async with serving(ScriptedGenerator(say("x"))) as url:
        host, port = url.removeprefix("http://").split(":")
        lines = {"host": f"{host}:{port}", **headers}
        request = "GET /live HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        request += "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        stream = await trio.open_tcp_stream(host, int(port))
        await stream.send_all(request.encode() + b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        answer = b"".join([bytes(chunk) async for chunk in stream]).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 403 ")
    assert f'"code":"{code}"' in body
    assert "content-security-policy: default-src 'none'" in head
    assert "x-request-id: " in head


@pytest.mark.parametrize(
    "header", [b"sec-websocket-protocol: \xff", b"connection: \xff, upgrade", b"x: \xe9"]
)
async def test_a_handshake_that_is_not_ascii_is_refused(
    header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(ScriptedGenerator(say("x"))) as url:
        host, port = url.removeprefix("http://").split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        request = f"GET /live HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: upgrade, close\r\n"
        request += "upgrade: websocket\r\nsec-websocket-version: 13\r\n"
        key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        await stream.send_all(request.encode() + key + header + b"\r\n\r\n")
        answer = await stream.receive_some(4096)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 ", b"HTTP/1.1 426 ")), answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_its_own_page_and_named_origins_may() -> None:
    options = FrontendOptions(access=AccessOptions(cors_origins="https://app.example"))
    async with serving(ScriptedGenerator(say("x")), options) as url:
        for origin in (url, url.replace("http:", "https:"), "https://app.example"):
            async with watching(url, extra_headers=[(b"origin", origin.encode())]) as socket:
                assert json.loads(await socket.get_message())["lanes"]


async def test_with_keys_watching_takes_one() -> None:
    options = FrontendOptions(access=AccessOptions(api_keys=KEYS))
    async with serving(ScriptedGenerator(say("x")), options) as url:
        for refused in (
            {},
            {"subprotocols": ["skippy.live"]},
            {"subprotocols": ["skippy.live", key_protocol("sk-wrong")]},
            {"subprotocols": ["skippy.live", "skippy.key.!!!"]},
            {"subprotocols": ["skippy.live", "skippy.key."]},
            {"extra_headers": [(b"authorization", b"Bearer sk-wrong")]},
        ):
            rejection = await refusal(url, **refused)
            assert rejection.status_code == 401
            assert b"invalid_api_key" in (rejection.body or b"")
        for key in KEYS:
            offered = ["skippy.live", key_protocol(key)]
            async with watching(url, subprotocols=offered) as socket:
                assert socket.subprotocol == "skippy.live"  # and never the key
                assert await socket.get_message()
            async with watching(url, extra_headers=[(b"authorization", f"Bearer {key}".encode())]) as socket:
                assert await socket.get_message()


async def test_another_subprotocol_is_refused() -> None:
    async with serving(ScriptedGenerator(say("x"))) as url:
        assert (await refusal(url, subprotocols=["graphql-ws"])).status_code == 400


async def test_no_websocket_is_anywhere_else() -> None:
    async with serving(ScriptedGenerator(say("x"))) as url:
        ws = url.replace("http:", "ws:")
        for path, status in (("/live/", 200), ("/v1/models", 200), ("/livex", 404)):
            with pytest.raises(ConnectionRejected) as refused:
                async with open_websocket_url(ws + path):
                    pass
            assert refused.value.status_code == (404 if path == "/live/" else status)


# -- what a watcher may do -----------------------------------------------------------------------------


async def test_it_takes_no_messages() -> None:
    async with serving(ScriptedGenerator(say("x"))) as url, watching(url) as socket:
        await socket.send_message("hello")
        assert await read_on(socket) == 1008


async def test_a_message_that_is_too_large_ends_it() -> None:
    async with serving(ScriptedGenerator(say("x"))) as url, watching(url) as socket:
        await socket.send_message("x" * 100_000)
        assert await read_on(socket) in (1006, 1009)


async def test_a_watcher_that_leaves_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    feeds: list[LiveFeed] = []
    real = LiveFeed.__init__

    def remember(self: LiveFeed, *arguments: Any, **keys: Any) -> None:
        feeds.append(self)
        real(self, *arguments, **keys)

    monkeypatch.setattr(LiveFeed, "__init__", remember)
    async with serving(ScriptedGenerator(say("x"))) as url:
        async with watching(url) as socket:
            await socket.get_message()
            assert feeds[0].watchers == 1
        while feeds[0].watchers:
            await trio.lowlevel.checkpoint()
        # One that is gone without a word, and one that only closes its side: of a WebSocket that is the end.
        for end in ("reset", "half-close"):
            async with watching(url) as socket:
                await socket.get_message()
                stream: Any = socket._stream
                if end == "reset":
                    await stream.aclose()
                else:
                    await stream.send_eof()
                while feeds[0].watchers:
                    await trio.lowlevel.checkpoint()


async def test_a_shutdown_does_not_wait_for_watchers() -> None:
    codes: list[int] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def watch(task_status: trio.TaskStatus[None]) -> None:
                async with watching(url) as socket:
                    await socket.get_message()
                    task_status.started()
                    codes.append(await read_on(socket))

            async with serving(ScriptedGenerator(say("x")), grace_secs=60) as url:
                await nursery.start(watch)
    assert codes == [1001]


# -- the feed itself -----------------------------------------------------------------------------------


class Clockwork:
    """A status that counts how often it was asked for, and tokens with it."""

    def __init__(self) -> None:
        self.asked = 0
        self._generator = ScriptedGenerator(say("x"))

    def __call__(self) -> ChainStatus:
        self.asked += 1
        status = self._generator.status()
        status.totals.generated_tokens = 10 * self.asked
        return status


async def test_nothing_is_looked_at_while_nobody_watches(autojump_clock: trio.testing.MockClock) -> None:
    status = Clockwork()
    feed = LiveFeed(status, period_secs=2.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        await trio.sleep(100)
        assert status.asked == 0
        for _ in range(2):
            with feed.watching() as snapshots:
                rates = [json.loads(await snapshots.receive())["tokens_per_second"] for _ in range(4)]
            assert rates == [0, 5, 5, 5]  # 10 tokens in each period
            asked = status.asked
            await trio.sleep(100)
            assert status.asked == asked
        nursery.cancel_scope.cancel()


async def test_who_comes_later_is_told_at_once(autojump_clock: trio.testing.MockClock) -> None:
    feed = LiveFeed(Clockwork())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        with feed.watching() as first:
            await first.receive()
            began = trio.current_time()
            with feed.watching() as second:
                await second.receive()
                assert trio.current_time() == began
                await second.receive()
                assert trio.current_time() == began + 1
        nursery.cancel_scope.cancel()


async def test_a_slow_watcher_is_dropped_and_others_are_not(autojump_clock: trio.testing.MockClock) -> None:
    feed = LiveFeed(Clockwork())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        with feed.watching() as slow, feed.watching() as quick:
            for _ in range(WAITING_SNAPSHOTS + 3):
                await quick.receive()
            assert feed.watchers == 1
            assert len([snapshot async for snapshot in slow]) == WAITING_SNAPSHOTS
            await quick.receive()
        assert feed.watchers == 0
        nursery.cancel_scope.cancel()


async def test_so_many_may_watch() -> None:
    feed = LiveFeed(Clockwork())
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_WATCHERS):
            stack.enter_context(feed.watching())
        with pytest.raises(Exception, match=re.escape(f"{MAX_WATCHERS} others watch already")):
            stack.enter_context(feed.watching())
    with feed.watching():
        feed.close()
        with pytest.raises(Exception, match="shutting down"):
            stack.enter_context(feed.watching())

"""What clients see while their requests wait: comments, refusals, deadlines; and what they leave behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import trio
import trio.testing

from skippy.config import OpenAIOptions
from skippy.frontend.caller import Caller
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.errors import ApiError
from skippy.frontend.generation import (
    ChainUnavailable,
    GenerationError,
    GenerationRequest,
    TooManyRequests,
    WorkTimedOut,
)
from skippy.frontend.lanes import LanePool
from skippy.frontend.options import FrontendOptions
from skippy.frontend.schemas import parse_completion
from skippy.frontend.service import CompletionService
from tests.support.cluster import toy_cluster

from .support import ScriptedGenerator, client, completion_body, say, serving

COMMENT = b": keep-alive\n\n"
STREAM = json.dumps(completion_body([1, 2], stream=True)).encode()


@contextlib.asynccontextmanager
async def streamed(service: CompletionService) -> AsyncIterator[AsyncIterator[bytes]]:
    """The chunks of a completion's stream, as the service makes them."""
    async with trio.open_nursery() as nursery:
        response = await service.completion(parse_completion(STREAM), Caller(nursery=nursery, request_id="r"))
        async with response.response as chunks:  # type: ignore[union-attr]
            yield aiter(chunks)
        nursery.cancel_scope.cancel()


async def test_comments_come_until_the_first_token(autojump_clock: trio.testing.MockClock) -> None:
    go = trio.Event()
    service = CompletionService(ScriptedGenerator(lambda _: [go, 97]), FrontendOptions(keep_alive_secs=10))
    started = trio.current_time()
    async with streamed(service) as chunks:
        for comment in range(1, 4):
            assert await anext(chunks) == COMMENT
            assert trio.current_time() - started == pytest.approx(10 * comment)
        await trio.sleep(3)
        go.set()
        assert b'"text":"a"' in await anext(chunks)
        assert trio.current_time() - started == pytest.approx(33)
        rest = b"".join([chunk async for chunk in chunks])
    assert COMMENT not in rest
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("keep_alive", [10, float("inf")])
async def test_a_stream_that_begins_in_time_has_no_comments(
    autojump_clock: trio.testing.MockClock, keep_alive: float
) -> None:
    go = trio.Event()
    options = FrontendOptions(keep_alive_secs=keep_alive)
    service = CompletionService(ScriptedGenerator(lambda _: [go, 97]), options)
    async with trio.open_nursery() as nursery:

        async def set_go() -> None:
            await trio.sleep(min(9, keep_alive))
            go.set()

        nursery.start_soon(set_go)
        async with streamed(service) as chunks:
            assert COMMENT not in b"".join([chunk async for chunk in chunks])


@pytest.mark.parametrize("secs", [5, 15])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (TooManyRequests("no lane became free within 5 s", 7), 429, "rate_limit_exceeded"),
        (WorkTimedOut("the generation made no progress for 60 s"), 504, "timeout"),
        (ChainUnavailable("stage 1 was lost"), 503, "service_unavailable"),
    ],
)
async def test_an_error_has_a_status_until_comments_have_begun(
    autojump_clock: trio.testing.MockClock, secs: float, failure: GenerationError, status: int, code: str
) -> None:
    go = trio.Event()
    service = CompletionService(ScriptedGenerator(lambda _: [go, failure]), FrontendOptions())
    async with trio.open_nursery() as nursery:

        async def set_go() -> None:
            await trio.sleep(secs)
            go.set()

        nursery.start_soon(set_go)
        if secs < 10:
            with pytest.raises(ApiError) as caught:
                await service.completion(parse_completion(STREAM), Caller(nursery=nursery, request_id="r"))
            error = caught.value
            assert (error.status, error.code) == (status, code)
            assert error.retry_after_secs == failure.retry_after_secs
        else:
            async with streamed(service) as chunks:
                comment, frame, *rest = b"".join([chunk async for chunk in chunks]).split(b"\n\n")
            assert comment + b"\n\n" == COMMENT
            assert json.loads(frame.removeprefix(b"data: "))["error"]["code"] == code
            assert rest == [b"data: [DONE]", b""]


async def test_refusals_over_http() -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        for field in ("entry_error", "queue_error"):
            setattr(generator, field, TooManyRequests("1 generations run and 16 wait", 12))
            for stream in (False, True):
                answer = await http.post("/v1/completions", json=completion_body("hi", stream=stream))
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "12")
                assert answer.json()["error"] == {
                    "message": "1 generations run and 16 wait",
                    "type": "rate_limit_error",
                    "param": None,
                    "code": "rate_limit_exceeded",
                }
            setattr(generator, field, None)
        answer = await http.post("/v1/completions", json=completion_body("hi"))
    assert answer.status_code == 200
    assert "retry-after" not in answer.headers


async def test_comments_over_http() -> None:
    go = trio.Event()
    generator = ScriptedGenerator(lambda _: [go, 97])
    async with client(generator, FrontendOptions(keep_alive_secs=0.01)) as http:
        body = completion_body("hi", stream=True)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            go.set()
            rest = [line async for line in lines if line and not line.startswith(":")]
    assert '"text":"a"' in rest[0]
    assert rest[-1] == "data: [DONE]"


@contextlib.asynccontextmanager
async def one_lane(**options: int) -> AsyncIterator[ChainGenerator]:
    """A generator with one lane, of toy stages."""
    async with toy_cluster(2, lane_count=1) as cluster:
        pool = LanePool(cluster.first, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            yield ChainGenerator(cluster.first, pool, "org/toy:Q4", OpenAIOptions(**options))
            nursery.cancel_scope.cancel()


async def until(generator: ChainGenerator, depth: int) -> None:
    while generator.gate.queue_depth != depth:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("keep_alive", [600, 0.001])
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_the_queue(stream: bool, keep_alive: float) -> None:
    body = json.dumps(completion_body("hello", stream=stream, max_tokens=3)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    async with (
        one_lane(generation_queue_capacity=3) as generator,
        serving(generator, FrontendOptions(keep_alive_secs=keep_alive)) as url,
    ):
        target = httpx.URL(url)
        request = GenerationRequest(prompt=[1], max_tokens=1)
        async with generator.generate(request), httpx.AsyncClient(base_url=url, timeout=60) as http:
            for _ in range(3):
                connections = [await trio.open_tcp_stream(target.host, target.port or 0) for _ in range(3)]
                for connection in connections:
                    await connection.send_all(head.encode() + body)
                await until(generator, 3)
                refused = await http.post("/v1/completions", json=completion_body("hi"))
                assert refused.status_code == 429
                if stream and keep_alive < 1:
                    assert b"200" in bytes(await connections[0].receive_some())
                for connection in connections:
                    await connection.aclose()
                await until(generator, 0)
        answer = await httpx_post(url, max_tokens=2)
    assert answer.json()["usage"]["completion_tokens"] == 2


async def httpx_post(url: str, **fields: int) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await http.post("/v1/completions", json=completion_body("hi", **fields))


async def test_a_prompt_in_the_making_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose prompt is still being tokenised has a place in the queue, and leaves it with the client."""
    async with one_lane(generation_queue_capacity=1) as generator:
        service = CompletionService(generator, FrontendOptions())

        async def forever(prompt: str, name: str) -> list[int]:
            await trio.sleep_forever()
            raise AssertionError("unreachable")

        wanted = parse_completion(json.dumps(completion_body("hello")).encode())
        async with trio.open_nursery() as nursery:
            with monkeypatch.context() as patch:
                patch.setattr(service._prompts, "tokens", forever)
                async with trio.open_nursery() as clients:
                    caller = Caller(nursery=clients, request_id="r")
                    for depth in (1, 2):
                        clients.start_soon(service.completion, wanted, caller)
                        await until(generator, depth)
                    with pytest.raises(ApiError) as caught:
                        await service.completion(wanted, Caller(nursery=nursery, request_id="r"))
                    clients.cancel_scope.cancel()
            assert caught.value.status == 429
            assert caught.value.message.startswith(
                "requests that run: 0, that wait: 2; there is room for no more"
            )
            answer = await service.completion(wanted, Caller(nursery=nursery, request_id="r"))
            assert answer.status_code == 200

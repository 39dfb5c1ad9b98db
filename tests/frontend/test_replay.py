"""What clients see of a stage that is lost in the middle of their answers: nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import httpx
import pytest
import trio

from skippy.config import OpenAIOptions
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool
from skippy.frontend.options import FrontendOptions
from skippy.protocol import MessageKind
from tests.support.cluster import Cluster, fixed_chunks, toy_cluster
from tests.support.lossy import Fate, Frame, LossyTransport

from .support import MODEL, client

LAST = 20_001
BODY = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 24, "seed": 5, "temperature": 0.9}


@attrs.define
class Server:
    """An endpoint over two stages, whose link to the second one can be lost."""

    http: httpx.AsyncClient
    cluster: Cluster
    transport: LossyTransport

    def lose_at(self, kind: MessageKind, nth: int = 0) -> None:
        """Lose the lane at the ``nth`` frame of a kind, once."""
        left = [nth]

        def fate(frame: Frame) -> Fate:
            if frame.kind != kind or frame.port != LAST or not left:
                return None
            left[0] -= 1
            return "lose" if left[0] < 0 and left.pop() else None

        self.transport.fate = fate

    def unplug_at(self, kind: MessageKind, nth: int) -> Callable[[], None]:
        """Lose the second stage at the ``nth`` frame of a kind; call what is returned to have it back."""
        self.lose_at(kind, nth)
        lose = self.transport.fate
        listeners, away = self.transport._listeners, {}

        def fate(frame: Frame) -> Fate:
            if lose(frame) is None:
                return None
            for endpoint in [endpoint for endpoint in listeners if endpoint.port == LAST]:
                away[endpoint] = listeners.pop(endpoint)
            self.transport.break_links(LAST)
            return "lose"

        self.transport.fate = fate
        return lambda: listeners.update(away)


@contextlib.asynccontextmanager
async def server(options: OpenAIOptions | None = None, **frontend: Any) -> AsyncIterator[Server]:
    transport = LossyTransport()
    async with toy_cluster(2, transport=transport, inline=True) as cluster, trio.open_nursery() as nursery:
        pool = LanePool(cluster.first, 2)
        nursery.start_soon(pool.serve)
        await pool.wait_ready()
        generator = ChainGenerator(cluster.first, pool, MODEL, options or fixed_chunks(4))
        async with client(generator, FrontendOptions(**frontend)) as http:
            yield Server(http, cluster, transport)
        nursery.cancel_scope.cancel()


def events(text: str) -> list[Any]:
    """What a stream says, without what differs from answer to answer; comments are no events."""
    said = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert said.pop() == "data: [DONE]"
    values = [json.loads(block.removeprefix("data: ")) for block in said]
    return [{key: value[key] for key in ("choices", "usage") if key in value} for value in values]


def content(said: list[Any]) -> str:
    return "".join(choice["text"] for event in said for choice in event["choices"])


@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        (MessageKind.CONFIGURE_GENERATION, 0),
        (MessageKind.PREFILL_EMBD, 0),
        (MessageKind.PREFILL_EMBD, 2),
        *((MessageKind.DECODE_EMBD, nth) for nth in (0, 1, 2, 11, 23)),
    ],
)
async def test_an_answer_is_that_of_a_chain_that_was_not_disturbed(kind: MessageKind, nth: int) -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    async with server() as undisturbed:
        stream = (await undisturbed.http.post("/v1/completions", json=body)).text
        whole = (await undisturbed.http.post("/v1/completions", json=BODY)).json()
        assert content(events(stream)) == whole["choices"][0]["text"]
        stop = whole["choices"][0]["text"][12:15]
        stopped = (await undisturbed.http.post("/v1/completions", json={**BODY, "stop": stop})).json()
    async with server() as lossy:
        lossy.lose_at(kind, nth)
        answer = await lossy.http.post("/v1/completions", json=body)
        assert content(events(answer.text)) == content(events(stream))
        assert events(answer.text)[-2:] == events(stream)[-2:]
        lossy.lose_at(kind, nth)
        answer = (await lossy.http.post("/v1/completions", json=BODY)).json()
        assert (answer["choices"], answer["usage"]) == (whole["choices"], whole["usage"])
        lossy.lose_at(kind, min(nth, 13))
        answer = (await lossy.http.post("/v1/completions", json={**BODY, "stop": stop})).json()
        assert (answer["choices"], answer["usage"]) == (stopped["choices"], stopped["usage"])


async def test_comments_until_the_stage_is_back() -> None:
    """A stream that has begun is kept alive, too."""
    body = {**BODY, "stream": True}
    async with server(keep_alive_secs=0.05) as lossy:
        undisturbed = events((await lossy.http.post("/v1/completions", json=body)).text)
        plug_in = lossy.unplug_at(MessageKind.DECODE_EMBD, 6)
        text = ""
        async with lossy.http.stream("POST", "/v1/completions", json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if '"text":' in text and text.endswith(": keep-alive\n\n" * 2):
                    plug_in()
    assert content(events(text)) == content(undisturbed)
    assert text.index('"text":') < text.rindex(": keep-alive")


@pytest.mark.parametrize("began", [False, True])
async def test_a_stage_that_does_not_come_back(began: bool) -> None:
    """503 before the first token; after it an error frame, and an end."""
    async with server(fixed_chunks(4, replay_timeout_secs=0.2)) as lossy:
        lossy.unplug_at(MessageKind.DECODE_EMBD if began else MessageKind.PREFILL_EMBD, 3)
        answer = await lossy.http.post("/v1/completions", json={**BODY, "stream": True})
        whole = "a stage of the chain was lost and not there again within 0.2 s"
        if not began:
            assert answer.status_code == 503
            assert answer.json()["error"]["message"].startswith(whole)
            return
        assert answer.status_code == 200
        blocks = answer.text.strip().split("\n\n")
        assert blocks[-1] == "data: [DONE]"
        error = json.loads(blocks[-2].removeprefix("data: "))["error"]
        assert error["code"] == "service_unavailable"
        assert error["message"].startswith(whole)
        assert content([json.loads(block.removeprefix("data: ")) for block in blocks[:-2]])

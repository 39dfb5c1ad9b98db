"""What a client waits for, and what not: the end of its stream comes before the chain has cleaned up."""

from __future__ import annotations

import httpx
import trio
import trio.testing

from skippy import embed
from skippy.config import OpenAIOptions
from skippy.protocol import MessageKind
from tests.support.scripted import ScriptedLane, scripted_peer

BODY = {"model": "toy", "prompt": "hello", "max_tokens": 2, "temperature": 0, "stream": True}


async def test_done_does_not_wait_for_stop() -> None:
    """The last stage says nothing to Stop until the client has its ``[DONE]``; the lane waits for it."""
    options = OpenAIOptions(bind_addr="127.0.0.1:0", generation_concurrency=1)
    finished = trio.Event()
    texts: list[str] = []

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            response = await client.post(f"{url}/completions", json=BODY)
            texts.append(response.text)
            finished.set()

    async def answer(lane: ScriptedLane) -> None:
        await lane.configure()
        await lane.receive(MessageKind.PREFILL_EMBD)
        await lane.acknowledge()
        for token in b"ok":
            await lane.predict(token)

    with trio.fail_after(60):
        async with scripted_peer() as peer, embed.open_openai(peer.stage, options) as endpoint:
            lane = await peer.accept()
            await endpoint.wait_ready()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, endpoint.url)
                await answer(lane)
                await finished.wait()
                # The lane is not lent again before Stop is acknowledged.
                finished = trio.Event()
                nursery.start_soon(ask, endpoint.url)
                await lane.stop()
                await answer(lane)
                await finished.wait()
                await lane.stop()
    for text in texts:
        assert text.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in text.replace(" ", "")
    assert len(texts) == 2

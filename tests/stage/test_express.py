"""Decode frames that leave from the engine's thread: over TCP, whatever happens to whoever waits for them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from skippy.engine import EngineError, StageEngine
from skippy.frontend.generation import GenerationError, GenerationRequest
from skippy.protocol import Buffer, MessageKind
from skippy.stage import RequestFailed
from skippy.stage.links import Link, TcpTransport
from skippy.stage.links.tcp import TcpLink
from skippy.stage.reasons import encode_reason
from skippy.stage.returns import ReturnStream
from skippy.stage.runtime import RuntimeThread
from skippy.stage.writer import LinkWriter
from tests.stage.test_chain import (
    PROMPT,
    exhaust,
    generate,
    generator_over,
    unsplit_tokens,
    wait_for_sequences,
)
from tests.support.cluster import toy_cluster
from tests.support.driver import driver_of

REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=8)


async def test_cancelling_at_any_moment_leaves_the_lane_usable() -> None:
    """The frame under way still leaves, its prediction still comes, and neither meets the next request."""
    expected = unsplit_tokens(PROMPT, 3)
    chance = random.Random(5)
    with trio.fail_after(60):
        async with toy_cluster(3, lane_count=1, transport=TcpTransport()) as cluster:
            async with generator_over(cluster, lanes=1) as generator:
                for _ in range(60):
                    with trio.move_on_after(chance.uniform(0, 0.02)):
                        await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=200))
                    tokens = await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=3))
                    assert tokens == expected
                assert cluster.first.context.connection_numbers() == 2  # the first lane was never replaced
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("broken", [0, 1, 2])
async def test_an_engine_failure_ends_one_request_and_the_chain_goes_on(broken: int) -> None:
    with trio.fail_after(30):
        async with (
            toy_cluster(3, transport=TcpTransport()) as cluster,
            generator_over(cluster, lanes=1) as generator,
        ):
            async with generator.generate(REQUEST) as stream:
                await stream.__anext__()
                cluster.engines[broken].fail_next = EngineError("out of luck")
                with pytest.raises(GenerationError):
                    await exhaust(stream)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


async def test_a_failure_that_nobody_waits_for_still_ends_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has left while the engine computes; then the engine fails, so the frame never leaves."""
    # The event loop hands the step over; the engine's thread would begin none for a client that left.
    monkeypatch.setattr(TcpLink, "descriptor", None)
    gate, reached = threading.Event(), threading.Event()

    def be_busy(_: StageEngine) -> None:
        reached.set()
        gate.wait(10)

    with trio.fail_after(30):
        async with (
            toy_cluster(2, lane_count=1, transport=TcpTransport()) as cluster,
            generator_over(cluster, lanes=1) as generator,
        ):
            async with generator.generate(REQUEST) as stream:
                await stream.__anext__()
                # The engine is busy, so the next decode waits in its queue and fails once it runs.
                cluster.first.context.scheduler.post(be_busy)
                await trio.to_thread.run_sync(reached.wait)
                cluster.engines[0].fail_next = EngineError("out of luck")
                with trio.move_on_after(0.05):
                    await exhaust(stream)  # tokens may be there already
            gate.set()
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


async def test_a_failure_that_the_next_frame_brings_to_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives before the event loop has heard of the failure, and keeps no reason from leaving."""
    told: list[bytes] = []
    over, all_told = threading.Event(), trio.Event()
    tell = ReturnStream.tell

    async def tell_and_record(stream: ReturnStream, reason: bytes) -> None:
        await tell(stream, reason)
        told.append(reason)
        all_told.set()

    monkeypatch.setattr(ReturnStream, "tell", tell_and_record)
    with trio.fail_after(30):
        async with (
            toy_cluster(2, lane_count=1, transport=TcpTransport()) as cluster,
            driver_of(cluster) as driver,
        ):
            await driver.start(PROMPT)
            await driver.decode(len(PROMPT) - 1, PROMPT[-1])
            scheduler = cluster.stages[1].context.scheduler
            await scheduler.run(lambda _: None)  # so that the call before is over
            runtime = scheduler._runtime
            assert isinstance(runtime, RuntimeThread)
            with monkeypatch.context() as patch:
                patch.setattr(runtime, "_pass_on", lambda: runtime.doorbell._calls and over.set())
                cluster.engines[1].fail_next = EngineError("out of luck")
                await driver.send(MessageKind.DECODE_EMBD, len(PROMPT), [65], decode_step=1)
                await trio.to_thread.run_sync(over.wait)
            await driver.send(MessageKind.DECODE_EMBD, len(PROMPT) + 1, [66], decode_step=2)
            await all_told.wait()
            assert told == [encode_reason(driver.request_id, RequestFailed("out of luck"))]
            await wait_for_sequences(cluster)


class SlowLink(Link):
    """Takes ``room`` bytes at once and nothing more until the writer's task sends."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent = b""

    @property
    def peer(self) -> str:
        return "slow"

    @property
    def sends_from_any_thread(self) -> bool:
        return True

    async def send(self, buffers: Sequence[Buffer]) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += b"".join(buffers)

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        data = b"".join(buffers)
        self.sent += data[: self.room]
        return [memoryview(data)[self.room :]] if len(data) > self.room else []

    async def receive_into(self, buffer: memoryview) -> int:
        raise AssertionError("not read from")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("room", [0, 3, 100])
async def test_what_a_reserved_frame_leaves_over_goes_before_all_put_since(room: int) -> None:
    link = SlowLink(room)
    writer = LinkWriter(link, 4)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await trio.testing.wait_all_tasks_blocked()
            reservation = writer.reserve()
            assert reservation is not None
            assert writer.reserve() is None
            writer.put([b"second"])
            writer.put([b"third"])
            await trio.testing.wait_all_tasks_blocked()
            assert link.sent == b""
            await trio.to_thread.run_sync(reservation.send, [b"fir", b"st"])
            reservation.release()
            await writer.wait_flushed()
            assert link.sent == b"firstsecondthird"
            assert writer.reserve() is not None
            nursery.cancel_scope.cancel()

"""What happens at the same time along a chain: by gates that only open if it does, by the order of events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, StageOptions
from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.protocol import Buffer, MessageKind
from skippy.stage.framing import receive_message
from skippy.stage.links import Link, Listener, TcpTransport, Transport
from tests.stage.test_chain import generate, unsplit_tokens
from tests.support.cluster import fixed_chunks, toy_cluster
from tests.support.driver import Driver, dial_driver
from tests.support.scripted import ScriptedLane, scripted_peer

K = MessageKind
CHUNK, CHUNKS = 128, 3
PROMPT = [65 + index % 26 for index in range(CHUNK * CHUNKS + 1)]
REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=2)
PATIENCE_SECS = 15.0
"""For gates in engine threads, which nothing else can open when a test fails."""


@attrs.frozen
class Happening:
    """``began`` or ``ended`` computing, or ``sent`` downstream, by a stage, of its n-th prefill chunk."""

    what: str
    stage: int
    chunk: int


class Record:
    """What has happened, in order; from any thread."""

    def __init__(self) -> None:
        self.happened: list[Happening] = []
        self._condition = threading.Condition()
        self._token = trio.lowlevel.current_trio_token()
        self._changed = trio.lowlevel.ParkingLot()

    def add(self, what: str, stage: int, chunk: int) -> None:
        with self._condition:
            self.happened.append(Happening(what, stage, chunk))
            self._condition.notify_all()
        self._token.run_sync_soon(self._changed.unpark_all)

    def wait_in_thread(self, happening: Happening) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: happening in self.happened, PATIENCE_SECS):
                raise AssertionError(f"{happening} did not come before something that must not wait for it")

    async def wait(self, happening: Happening) -> None:
        while happening not in self.happened:
            await self._changed.park()

    def order(self, *happenings: Happening) -> bool:
        """Whether all of these happened, in this order."""
        places = [self.happened.index(happening) for happening in happenings]
        return places == sorted(places)


class RecordingEngine(ToyEngine):
    """Records the chunks it computes; ``before`` one it waits for something that must not depend on it."""

    record: Record
    before: dict[int, Happening]
    stage: int
    chunk: int

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        if segments[0].count != CHUNK:
            super().decode(segments, output)
            return
        chunk, self.chunk = self.chunk, self.chunk + 1
        self.record.add("began", self.stage, chunk)
        if chunk in self.before:
            self.record.wait_in_thread(self.before[chunk])
        super().decode(segments, output)
        self.record.add("ended", self.stage, chunk)


@attrs.define
class RecordingTransport(Transport):
    """TCP on which every frame is its writer task's to send; ``hold``: what a chunk waits for to leave."""

    record: Record
    hold: dict[tuple[int, int], Happening] = attrs.field(factory=dict)
    ports: dict[int, int] = attrs.field(factory=dict)
    inner: TcpTransport = attrs.field(factory=TcpTransport)

    async def listen(self, endpoint: Endpoint) -> Listener:
        return await self.inner.listen(endpoint)

    def adopt(self, sock: Any, scheme: str = "tcp") -> Listener:
        self.ports[sock.getsockname()[1]] = len(self.ports)
        return self.inner.adopt(sock, scheme)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        # Stages start last to first, so the last one has number 0.
        stage = len(self.ports) - 1 - self.ports[endpoint.port]
        return RecordingLink(await self.inner.connect(endpoint, source_host=source_host), self, stage - 1)


class RecordingLink(Link):
    def __init__(self, inner: Link, transport: RecordingTransport, stage: int) -> None:
        self._inner = inner
        self._transport = transport
        self._stage = stage
        self._chunk = 0

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def send(self, buffers: Sequence[Buffer]) -> None:
        is_chunk = sum(memoryview(buffer).nbytes for buffer in buffers) > CHUNK * 32
        chunk = self._chunk
        if is_chunk:
            self._chunk += 1
            if (wanted := self._transport.hold.get((self._stage, chunk))) is not None:
                await self._transport.record.wait(wanted)
        await self._inner.send(buffers)
        if is_chunk:
            self._transport.record.add("sent", self._stage, chunk)

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        return [memoryview(buffer).cast("B") for buffer in buffers]

    async def receive_into(self, buffer: memoryview) -> int:
        return await self._inner.receive_into(buffer)

    def close(self) -> None:
        self._inner.close()


async def run_chain(
    options: StageOptions,
    *,
    before: dict[tuple[int, int], Happening] | None = None,
    hold: dict[tuple[int, int], Happening] | None = None,
) -> Record:
    """One request of CHUNKS chunks, three stages, one lane; ``before`` and ``hold`` by (stage, chunk)."""
    record = Record()
    numbers = iter((2, 1, 0))  # stages start last to first

    def make(*args: Any, **kwargs: Any) -> RecordingEngine:
        engine = RecordingEngine(*args, **kwargs)
        engine.record, engine.stage, engine.chunk = record, next(numbers), 0
        engine.before = {c: what for (s, c), what in (before or {}).items() if s == engine.stage}
        return engine

    with trio.fail_after(20):
        async with toy_cluster(
            3,
            options=options,
            transport=(transport := RecordingTransport(record, hold or {})),
            scheme="tcp",
            make_engine=make,
            lane_count=1,
        ) as cluster:
            assert transport.ports
            pool = LanePool(cluster.first, 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pool.serve)
                await pool.wait_ready()
                generator = ChainGenerator(cluster.first, pool, "toy", fixed_chunks(CHUNK))
                assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 2)
                nursery.cancel_scope.cancel()
    return record


@pytest.mark.parametrize("options", [StageOptions(), StageOptions(reply_credit_limit=1)])
async def test_every_stage_computes_while_the_next_one_does(options: StageOptions) -> None:
    """Each stage's second chunk is held inside its engine until the next stage has computed its first."""
    before = {(stage, 1): Happening("ended", stage + 1, 0) for stage in (0, 1)}
    record = await run_chain(options, before=before)
    assert record.order(Happening("ended", 2, 0), Happening("ended", 1, 1))
    assert record.order(Happening("ended", 1, 0), Happening("ended", 0, 1))


async def test_every_stage_computes_while_its_writer_sends() -> None:
    """No chunk leaves a stage before that stage is computing the next one."""
    hold = {
        (stage, chunk): Happening("began", stage, chunk + 1)
        for stage in (0, 1)
        for chunk in range(CHUNKS - 1)
    }
    record = await run_chain(StageOptions(), hold=hold)
    for (stage, chunk), began in hold.items():
        assert record.order(began, Happening("sent", stage, chunk))


async def test_the_synchronous_baseline_sends_each_chunk_before_it_computes_the_next() -> None:
    record = await run_chain(StageOptions(async_prefill_forward=False))
    for stage in (0, 1):
        for chunk in range(CHUNKS - 1):
            sent, began = Happening("sent", stage, chunk), Happening("began", stage, chunk + 1)
            assert record.order(Happening("ended", stage, chunk), sent, began)


# -- credit and barriers, before a last stage that the test plays -----------------------------------------


class Inbox:
    """What arrives at the scripted stage, read as it comes."""

    def __init__(self, lane: ScriptedLane) -> None:
        self._lane = lane
        self.kinds = [K.CONFIGURE_GENERATION]

    async def read(self) -> None:
        while True:
            message = await receive_message(self._lane.link, self._lane.decoder)
            assert message is not None
            self.kinds.append(message.kind)

    async def settled(self) -> list[MessageKind]:
        """All that has arrived, once nothing moves any more."""
        await trio.testing.wait_all_tasks_blocked()
        return self.kinds


@contextlib.asynccontextmanager
async def driven_peer(options: StageOptions) -> AsyncIterator[tuple[Driver, ScriptedLane, Inbox]]:
    with trio.fail_after(20):
        async with (
            scripted_peer(options, inline=True) as peer,
            dial_driver(peer.stage) as driver,
            trio.open_nursery() as nursery,
        ):
            await driver.send(K.CONFIGURE_GENERATION)
            lane = await peer.accept()
            await lane.open_returns(await lane.receive(K.CONFIGURE_GENERATION))
            inbox = Inbox(lane)
            nursery.start_soon(inbox.read)
            yield driver, lane, inbox
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("settings", "credit"),
    [
        ({}, 3),
        ({"max_inflight": 1}, 1),  # and each is waited for
        ({"max_inflight": 3}, 2),
        ({"max_inflight": 1, "reply_credit_limit": 2}, 2),
        ({"max_inflight": 16, "reply_credit_limit": 0}, 1),
        ({"reply_credit_limit": 12}, 8),
    ],
)
async def test_no_more_chunks_leave_than_credit_allows(settings: dict[str, int], credit: int) -> None:
    """Chunks leave before the settings are acknowledged, up to the credit, and one more for each ACK."""
    async with driven_peer(StageOptions(**settings)) as (driver, lane, inbox):

        async def send() -> None:
            for index in range(8):
                await driver.send(K.PREFILL_EMBD, 4 * index, [65] * 4)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await inbox.settled() == [K.CONFIGURE_GENERATION, *[K.PREFILL_EMBD] * credit]
            await lane.acknowledge()  # the settings
            for count in range(credit, 8):
                assert len(await inbox.settled()) == 1 + count
                await lane.acknowledge()
            assert len(await inbox.settled()) == 9


@pytest.mark.parametrize("kind", [K.TRIM_SESSION, K.CONFIGURE_GENERATION, K.STOP])
async def test_controls_leave_behind_the_chunks_before_them(kind: MessageKind) -> None:
    """Trim and settings in their turn; Stop only after every ACK that is owed, so that none is left over."""
    async with driven_peer(StageOptions()) as (driver, lane, inbox):
        for index in range(3):
            await driver.send(K.PREFILL_EMBD, 4 * index, [65] * 4)
        await driver.send(kind, token_count=8 if kind is K.TRIM_SESSION else 0)
        sent = [K.CONFIGURE_GENERATION, *[K.PREFILL_EMBD] * 3]
        if kind is not K.STOP:
            assert await inbox.settled() == [*sent, kind]
            return
        for _ in range(4):  # the settings are not acknowledged yet either
            assert await inbox.settled() == sent
            await lane.acknowledge()
        assert await inbox.settled() == [*sent, K.STOP]

"""A generation whose lane is lost goes on on another one, and nobody can tell by its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.protocol import MessageKind, SamplingConfig
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens
from tests.support.cluster import Cluster, toy_cluster
from tests.support.lossy import Fate, Frame, LossyTransport

SAMPLED = SamplingConfig(
    flags=1,
    seed=11,
    temperature=0.9,
    top_k=40,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repeat_penalty=1.2,
)
REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=12, sampling=SAMPLED)
RIGHT = unsplit_tokens(PROMPT, 12, SAMPLED)
PORTS = {"stage 1": 20_001, "stage 2": 20_002, "return stream": 20_000}
LANES = 2
CHUNK = 7


@attrs.define
class Chain:
    cluster: Cluster
    transport: LossyTransport
    generator: ChainGenerator
    sink: MemorySink

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(event.attributes) for event in self.sink.events if event.name == name]

    @property
    def replays(self) -> list[str]:
        """What became of the replays, in order."""
        known = (
            names.STAGE_OPENAI_REPLAY_BEGIN,
            names.STAGE_OPENAI_REPLAY_END,
            names.STAGE_OPENAI_REPLAY_FAILED,
        )
        return [event.name.rpartition("_")[2] for event in self.sink.events if event.name in known]


@contextlib.asynccontextmanager
async def lossy_chain(lanes: int = LANES, stages: int = 3, **options: Any) -> AsyncIterator[Chain]:
    """A chain over links that break; leaving checks that nothing is left of its requests."""
    transport, sink = LossyTransport(), MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    async with (
        trio.open_nursery() as nursery,
        toy_cluster(
            stages, transport=transport, inline=True, telemetry=telemetry, lane_count=lanes
        ) as cluster,
    ):
        await nursery.start(telemetry.serve)
        async with generator_over(cluster, lanes, CHUNK, **options) as generator:
            yield Chain(cluster, transport, generator, sink)
            transport.fate = lambda _: None
            await trio.sleep(5)
            assert cluster.free_sequences == [lanes] * stages
            gate, pool = generator._gate, generator._pool
            assert gate.reserved_tokens == 0
            assert not gate._running
            assert not gate._replacing
            assert not generator.prefill._decoding
            assert len(pool._idle) == lanes
        nursery.cancel_scope.cancel()


def once(port: int, number: int, fate: Fate) -> Callable[[Frame], Fate]:
    """The fate of one frame; all others arrive."""
    left = [fate]

    def decide(frame: Frame) -> Fate:
        return left.pop() if left and (frame.port, frame.number) == (port, number) else None

    return decide


async def frames_of(request: GenerationRequest, port: int) -> int:
    """How many frames of an undisturbed request are sent to ``port``."""
    async with lossy_chain() as chain:
        assert await generate(chain.generator, request) == RIGHT
    return chain.transport.count(port)


@pytest.mark.parametrize("fate", ["lose", "deliver and break"])
@pytest.mark.parametrize("where", PORTS)
async def test_a_lane_that_is_lost_at_any_frame_is_replayed(
    where: str, fate: Fate, autojump_clock: trio.testing.MockClock
) -> None:
    port = PORTS[where]
    count = await frames_of(REQUEST, port)
    # A lane: settings, 43 tokens in chunks of 7, a step for each token, Stop.
    assert count == (1 + 12 if where == "return stream" else 1 + 7 + 12 + 1)
    for number in range(count):
        async with lossy_chain() as chain:
            chain.transport.fate = once(port, number, fate)
            assert await generate(chain.generator, REQUEST) == RIGHT, number
        whole = ["begin", "end"]
        if fate == "lose":
            is_stop = where != "return stream" and number == count - 1
            assert chain.replays == ([] if is_stop else whole), number
        else:  # what was delivered may have been the last that was needed
            assert chain.replays in (whole, []), number


async def test_frames_of_a_replay(autojump_clock: trio.testing.MockClock) -> None:
    """Settings, the whole prompt, then what was generated; under a higher generation and another session."""
    K = MessageKind
    async with lossy_chain(stages=2) as chain:
        async with chain.generator.generate(REQUEST) as stream:
            tokens = [await stream.__anext__() for _ in range(10)]
            lost = stream._admission.lane
            assert lost.generation == 0
            chain.transport.break_links(PORTS["stage 1"])
            chain.transport.frames.clear()
            tokens += [token async for token in stream]
            lane = stream._admission.lane
            assert lane.generation == 1
            assert lost.request is not None
            assert lane.request is not None
            assert lost.request[0] == lane.request[0]
            assert lost.request[1] != lane.request[1]
        kinds = [frame.kind for frame in chain.transport.frames if frame.port == PORTS["stage 1"]]
        del kinds[: kinds.index(K.CONFIGURE_GENERATION)]  # what could not be sent any more
    assert tokens == RIGHT
    # 44 tokens of the prompt and 10 or 11 that have come, in chunks of 7.
    replay = [K.CONFIGURE_GENERATION, *[K.PREFILL_EMBD] * 7, K.DECODE_REPLAY_EMBD, K.DECODE_REPLAY_FINAL_EMBD]
    assert kinds[: len(replay)] == replay
    assert set(kinds[len(replay) :]) <= {K.DECODE_EMBD}

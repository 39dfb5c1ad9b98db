"""A generation whose lane is lost goes on on another one, and nobody can tell by its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import KvCacheConfig
from skippy.engine import EngineError
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable, GenerationError, GenerationRequest, ReplayRefused
from skippy.frontend.recovery import MAX_FRUITLESS
from skippy.protocol import MessageKind, SamplingConfig
from skippy.stage import LaneLost
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, exhaust, generate, generator_over, unsplit_tokens
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
K = MessageKind


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
async def lossy_chain(
    lanes: int = LANES, stages: int = 3, *, kv: KvCacheConfig | None = None, **options: Any
) -> AsyncIterator[Chain]:
    """A chain over links that break; leaving checks that nothing is left of its requests."""
    transport, sink = LossyTransport(), MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    async with (
        trio.open_nursery() as nursery,
        toy_cluster(
            stages, transport=transport, inline=True, telemetry=telemetry, lane_count=lanes, kv_cache=kv
        ) as cluster,
    ):
        await nursery.start(telemetry.serve)
        async with generator_over(cluster, lanes, CHUNK, **options) as generator:
            yield Chain(cluster, transport, generator, sink)
            transport.fate = lambda _: None
            await trio.sleep(5)
            assert cluster.free_sequences == [lanes] * stages
            gate, pool = generator.gate, generator._pool
            assert gate.reserved_tokens == 0
            assert not gate._running
            assert not len(gate._replays)
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


@pytest.mark.parametrize(("where", "numbers"), [("stage 1", range(16, 28)), ("return stream", range(8, 14))])
async def test_a_lane_that_is_lost_again_in_its_replay(
    where: str, numbers: range, autojump_clock: trio.testing.MockClock
) -> None:
    """At each frame of the replay, and at each step behind it, after seven tokens."""
    for number in numbers:
        losses = {(PORTS["stage 1"], 15), (PORTS[where], number)}

        def fate(frame: Frame, losses: set[tuple[int, int]] = losses) -> Fate:
            if (frame.port, frame.number) not in losses:
                return None
            losses.remove((frame.port, frame.number))
            return "lose"

        async with lossy_chain() as chain:
            chain.transport.fate = fate
            assert await generate(chain.generator, REQUEST) == RIGHT, number
        assert not losses, number
        ends = ["begin", "end"]
        # Where nothing had acknowledged the settings, the next lane is still the same replay.
        assert chain.replays in (["begin", "failed", *ends], ends * 2, ends), number


async def test_logprobs_stay_with_their_tokens(autojump_clock: trio.testing.MockClock) -> None:
    request = attrs.evolve(REQUEST, top_logprobs=3)

    async def answer(loss: int | None) -> list[Any]:
        async with lossy_chain() as chain, chain.generator.generate(request) as stream:
            if loss is not None:
                chain.transport.fate = once(PORTS["return stream"], loss, "lose")
            return [(token, stream.logprobs) async for token in stream]

    undisturbed = await answer(None)
    assert [token for token, _ in undisturbed] == RIGHT
    for loss in range(1, 13):
        assert await answer(loss) == undisturbed, loss


@pytest.mark.parametrize("taken", range(6))
async def test_tokens_that_came_and_were_not_taken(
    taken: int, autojump_clock: trio.testing.MockClock
) -> None:
    """The steps run ahead of their reader; what came before the loss is not asked for again."""
    async with lossy_chain() as chain, chain.generator.generate(REQUEST) as stream:
        tokens = [await stream.__anext__() for _ in range(taken + 1)]
        await trio.sleep(1)
        chain.transport.break_links(PORTS["stage 1"])
        await trio.sleep(taken % 2)
        assert tokens + [token async for token in stream] == RIGHT


async def test_a_chain_of_one_has_no_lane_to_lose_but_the_rules_are_the_same(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with lossy_chain(stages=1) as chain, chain.generator.generate(REQUEST) as stream:
        tokens = [await stream.__anext__()]
        stream._admission.lane.lane.fail(LaneLost("for the test"))
        assert tokens + [token async for token in stream] == RIGHT
    assert chain.replays == ["begin", "end"]


@pytest.mark.parametrize("kind", [K.PREFILL_EMBD, K.DECODE_REPLAY_FINAL_EMBD])
async def test_a_request_that_its_stage_dies_of(
    kind: MessageKind, autojump_clock: trio.testing.MockClock
) -> None:
    """Every stage that sees the request's frames of this kind is lost; the others' go on."""
    async with lossy_chain(lanes=1) as chain:
        async with chain.generator.generate(REQUEST) as stream:
            await stream.__anext__()
            chain.transport.fate = lambda frame: "deliver and break" if frame.kind == kind else None
            chain.transport.break_links(PORTS["stage 1"])
            with pytest.raises(ChainUnavailable, match=f"lost again, after {MAX_FRUITLESS} replays"):
                await exhaust(stream)
        chain.transport.fate = lambda _: None
        assert await generate(chain.generator, REQUEST) == RIGHT
    assert chain.replays == ["begin", "failed"] * MAX_FRUITLESS


async def test_replays_that_bring_tokens_may_be_many(autojump_clock: trio.testing.MockClock) -> None:
    """A lane is lost behind every single token."""
    tokens: list[int] = []
    async with lossy_chain() as chain, chain.generator.generate(REQUEST) as stream:
        async for token in stream:
            tokens.append(token)
            chain.transport.break_links(PORTS["stage 2"])
    assert tokens == RIGHT
    assert len(chain.replays) > 2 * MAX_FRUITLESS
    assert "failed" not in chain.replays


async def test_lanes_that_only_seem_alive_are_no_replays(autojump_clock: trio.testing.MockClock) -> None:
    """Idle lanes to a stage that has gone end when they are used; that says nothing about the request."""
    async with lossy_chain(lanes=6) as chain, chain.generator.generate(REQUEST) as stream:
        tokens = [await stream.__anext__()]
        old = chain.transport.connected
        chain.transport.fate = lambda frame: "lose" if frame.link < old else None
        assert tokens + [token async for token in stream] == RIGHT
        assert stream._admission.lane.generation == 1
    assert chain.replays == ["begin", "end"]


def unplug(chain: Chain, *ports: int) -> Callable[[], None]:
    """Nothing listens at these ports any more; call what is returned to have it back."""
    listeners = chain.transport._listeners
    away = {endpoint: listeners.pop(endpoint) for endpoint in list(listeners) if endpoint.port in ports}
    for port in ports:
        chain.transport.break_links(port)
    return lambda: listeners.update(away)


@pytest.mark.parametrize("taken", [0, 3])
async def test_a_stage_that_stays_away(taken: int, autojump_clock: trio.testing.MockClock) -> None:
    async with lossy_chain(replay_timeout_secs=20) as chain:
        async with chain.generator.generate(REQUEST) as stream:
            for _ in range(taken):
                await stream.__anext__()
            plug_in = unplug(chain, PORTS["stage 2"])
            began = trio.current_time()
            with pytest.raises(ChainUnavailable, match="not there again within 20 s") as caught:
                await exhaust(stream)
            assert caught.value.status == 503
            assert trio.current_time() - began == pytest.approx(20, abs=1)
        plug_in()
        await chain.generator._pool.wait_ready()
        assert await generate(chain.generator, REQUEST) == RIGHT
    assert chain.replays == ["begin", "failed"]


async def test_a_wait_without_limit(autojump_clock: trio.testing.MockClock) -> None:
    """Nor does the work's own deadline end it."""
    async with lossy_chain(replay_timeout_secs=0) as chain, chain.generator.generate(REQUEST) as stream:
        tokens = [await stream.__anext__()]
        plug_in = unplug(chain, PORTS["stage 1"])
        async with trio.open_nursery() as nursery:

            async def come_back() -> None:
                await trio.sleep(10_000)
                plug_in()

            nursery.start_soon(come_back)
            tokens += [token async for token in stream]
    assert tokens == RIGHT
    assert chain.replays == ["begin", "end"]


async def test_without_replay_the_request_ends(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        lossy_chain(replay_on_stage_loss=False) as chain,
        chain.generator.generate(REQUEST) as stream,
    ):
        await stream.__anext__()
        chain.transport.break_links(PORTS["stage 1"])
        with pytest.raises(ChainUnavailable, match="a stage of the chain was lost: "):
            await exhaust(stream)
    assert chain.replays == []


async def test_what_the_request_is_at_fault_for_is_not_replayed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with lossy_chain() as chain, chain.generator.generate(REQUEST) as stream:
        await stream.__anext__()
        chain.cluster.engines[1].fail_next = EngineError("out of luck")
        with pytest.raises(GenerationError, match="out of luck"):
            await exhaust(stream)
    assert chain.replays == []


@pytest.mark.parametrize("taken", [0, 2])
async def test_a_sampler_with_a_state_of_its_own_is_not_replayed_once_it_has_drawn(
    taken: int, autojump_clock: trio.testing.MockClock
) -> None:
    sampling = SamplingConfig(flags=1, seed=3, mirostat_mode=2, mirostat_entropy=4.0)
    request = attrs.evolve(REQUEST, sampling=sampling)
    right = unsplit_tokens(REQUEST.prompt, REQUEST.max_tokens, sampling)
    async with lossy_chain() as chain, chain.generator.generate(request) as stream:
        tokens = [await stream.__anext__() for _ in range(taken)]
        chain.transport.break_links(PORTS["stage 1"])
        if taken:
            with pytest.raises(ReplayRefused, match="cannot be replayed, because mirostat keeps state"):
                await exhaust(stream)
        else:
            tokens += [token async for token in stream]
            assert tokens == right
    assert chain.replays == ([] if taken else ["begin", "end"])


async def test_a_client_that_leaves_while_its_request_waits_for_a_lane(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with lossy_chain() as chain:
        with trio.move_on_after(5) as scope:
            async with chain.generator.generate(REQUEST) as stream:
                await stream.__anext__()
                plug_in = unplug(chain, PORTS["stage 1"])
                await exhaust(stream)
        assert scope.cancelled_caught
        assert chain.generator.gate.reserved_tokens == 0
        plug_in()
    assert chain.replays == ["begin", "failed"]


async def test_a_client_that_leaves_at_any_frame_of_a_replay(autojump_clock: trio.testing.MockClock) -> None:
    first = 17
    for number in range(first + 1, first + 12):
        scope = trio.CancelScope()

        lose_one = once(PORTS["stage 1"], first, "lose")

        def fate(
            frame: Frame,
            number: int = number,
            scope: trio.CancelScope = scope,
            lose_one: Callable[[Frame], Fate] = lose_one,
        ) -> Fate:
            if (frame.port, frame.number) == (PORTS["stage 2"], number):
                scope.cancel()
            return lose_one(frame)

        async with lossy_chain() as chain:
            chain.transport.fate = fate
            with scope:
                await generate(chain.generator, REQUEST)
            assert scope.cancelled_caught, number
            assert await generate(chain.generator, REQUEST) == RIGHT


async def test_a_replay_goes_before_those_who_wait(autojump_clock: trio.testing.MockClock) -> None:
    """And keeps its room in the cache: what waits gets neither lane nor positions of it."""
    ended: list[str] = []

    async def client(name: str) -> None:
        assert await generate(chain.generator, REQUEST) == RIGHT
        ended.append(name)

    async with lossy_chain(lanes=2) as chain:
        gate = chain.generator.gate
        chain.transport.fate = once(PORTS["stage 1"], 24, "lose")
        async with trio.open_nursery() as nursery:
            for name in ("first", "second", "third", "fourth"):
                nursery.start_soon(client, name)
                await trio.testing.wait_all_tasks_blocked()
                assert gate.reserved_tokens <= 2 * (len(PROMPT) + 12)
    assert sorted(ended[:2]) == ["first", "second"]
    assert chain.replays == ["begin", "end"]

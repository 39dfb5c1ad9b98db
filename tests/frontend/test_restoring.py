"""Prompts of which the stages still have the beginning: the same tokens, and less of them computed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import KvCacheConfig, StageOptions
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest, Timings
from skippy.protocol import MessageKind as K, SamplingConfig
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, generator_over, unsplit_tokens
from tests.stage.test_restores_audit import spoil
from tests.support.cluster import Cluster, fixed_chunks, toy_cluster
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
ON = KvCacheConfig(mode="lookup-record", min_tokens=8)
AUDITED = attrs.evolve(ON, audit_rate=1.0)
CHUNK = 7
FIRST_PORT = 20_000
all_chains = pytest.mark.parametrize("stages", [1, 2, 3])


@attrs.define
class Chain:
    """A chain of toy stages with caches, and what went over its links."""

    cluster: Cluster
    transport: LossyTransport
    generator: ChainGenerator
    sink: MemorySink

    async def generate(self, request: GenerationRequest) -> tuple[list[int], Timings]:
        async with self.generator.generate(request) as stream:
            tokens = [token async for token in stream]
        return tokens, stream.timings

    def count(self, kind: K, port: int = FIRST_PORT + 1) -> int:
        """Frames of a kind that were sent to a stage."""
        return sum(frame.kind == kind and frame.port == port for frame in self.transport.frames)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(event.attributes) for event in self.sink.events if event.name == name]


@contextlib.asynccontextmanager
async def caching_chain(
    stages: int = 3,
    lanes: int = 2,
    config: KvCacheConfig = ON,
    chunk: int = CHUNK,
    make_engine: Callable[..., ToyEngine] = ToyEngine,
    safe: bool = False,
    unified: bool = False,
    **options: Any,
) -> AsyncIterator[Chain]:
    """Leaving checks that no lane and no sequence is left with anyone."""
    transport, sink = LossyTransport(), MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    with trio.fail_after(60):
        async with (
            trio.open_nursery() as nursery,
            toy_cluster(
                stages,
                transport=transport,
                inline=True,
                telemetry=telemetry,
                lane_count=lanes,
                kv_cache=config,
                kv_unified=unified,
                options=StageOptions(safe_mode=safe),
                make_engine=make_engine,
            ) as cluster,
        ):
            await nursery.start(telemetry.serve)
            async with generator_over(cluster, lanes, chunk, **options) as generator:
                chain = Chain(cluster, transport, generator, sink)
                yield chain
                transport.fate = lambda _: None
                await settled(chain, lanes)
                gate = generator.gate
                assert (gate.reserved_tokens, gate.running) == (0, 0)
                assert not generator.prefill._decoding
            nursery.cancel_scope.cancel()


async def settled(chain: Chain, lanes: int) -> None:
    """Wait until every lane is idle again."""
    pool = chain.generator._pool
    while pool.idle_lanes < lanes or chain.generator.gate.reserved_tokens:
        await trio.lowlevel.checkpoint()
    assert chain.cluster.free_sequences == [
        stage.context.scheduler.info.max_sequences for stage in chain.cluster.stages
    ]


def request(prompt: list[int], count: int = 12, **more: Any) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, max_tokens=count, **more)


@all_chains
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
async def test_the_same_prompt_again(stages: int, sampling: SamplingConfig | None) -> None:
    """All but its last token is there, and a greedy answer is known; penalties count what was restored."""
    right = unsplit_tokens(PROMPT, 12, sampling)
    async with caching_chain(stages) as chain:
        cold, timings = await chain.generate(request(PROMPT, sampling=sampling))
        assert (cold, timings.cached_tokens, timings.prefill_tokens) == (right, 0, len(PROMPT) - 1)
        prefills = chain.count(K.PREFILL_EMBD)
        for _ in range(3):
            warm, timings = await chain.generate(request(PROMPT, sampling=sampling))
            assert warm == right
            assert timings.cached_tokens == len(PROMPT) - (sampling is not None)
            assert timings.prefill_tokens == 0
        assert chain.count(K.PREFILL_EMBD) == prefills


@all_chains
async def test_the_next_turn_of_a_chat_computes_only_what_is_new(stages: int) -> None:
    """Asked for the moment the answer before is complete, turn after turn."""
    async with caching_chain(stages) as chain:
        prompt, known = list(PROMPT), 0
        for turn in range(4):
            tokens, timings = await chain.generate(request(prompt))
            assert tokens == unsplit_tokens(prompt, 12)
            assert timings.cached_tokens == known, turn
            assert timings.prefill_tokens == len(prompt) - 1 - known
            known = len(prompt) + len(tokens) - 1  # the last one was never computed
            prompt += [*tokens, *b" and then?"]


@all_chains
async def test_a_prompt_that_begins_like_another(stages: int) -> None:
    prompt = [*PROMPT[:30], *b"walks away from it all"]
    async with caching_chain(stages) as chain:
        await chain.generate(request(PROMPT))
        tokens, timings = await chain.generate(request(prompt))
        assert tokens == unsplit_tokens(prompt, 12)
        assert timings.cached_tokens == 30
        tokens, timings = await chain.generate(request([*PROMPT, 1, 2]))  # the first one is not forgotten
        assert tokens == unsplit_tokens([*PROMPT, 1, 2], 12)
        assert timings.cached_tokens == len(PROMPT)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
async def test_a_new_tail_takes_one_pass(sampling: SamplingConfig | None) -> None:
    """The prompt's last token goes with the last chunk behind what was restored, and that chunk predicts."""
    tail = list(b"walks away from it all")
    prompt = [*PROMPT[:30], *tail]
    async with caching_chain() as chain:
        await chain.generate(request(PROMPT))
        kinds = (K.PREFILL_EMBD, K.PREFILL_FINAL_EMBD, K.DECODE_EMBD)
        before = [chain.count(kind) for kind in kinds]
        tokens, timings = await chain.generate(request(prompt, sampling=sampling))
        assert tokens == unsplit_tokens(prompt, 12, sampling)
        assert (timings.cached_tokens, timings.prefill_tokens) == (30, len(tail) - 1)
        chunks = -(-len(tail) // CHUNK)
        sent = [chain.count(kind) - then for kind, then in zip(kinds, before, strict=True)]
        assert sent == [chunks - 1, 1, 11]
        # Of the same prompt again only the last token is left, which the chain restores and decodes at once.
        tokens, _ = await chain.generate(request(prompt, sampling=sampling))
        assert tokens == unsplit_tokens(prompt, 12, sampling)
        assert chain.count(K.PREFILL_FINAL_EMBD) - before[1] == 1


async def test_what_stage_0_does_not_have_is_not_asked_for() -> None:
    async with caching_chain() as chain:
        await chain.generate(request(PROMPT))
        other = [256, *b"something else altogether, and long enough"]
        tokens, timings = await chain.generate(request(other))
        assert (tokens, timings.cached_tokens) == (unsplit_tokens(other, 12), 0)
        tokens, timings = await chain.generate(request(PROMPT[:5]))  # shorter than min_tokens
        assert (tokens, timings.cached_tokens) == (unsplit_tokens(PROMPT[:5], 12), 0)
        for kind in (K.TRY_RESTORE_PREFILL, K.TRY_RESTORE_PREFILL_DECODE, K.PROBE_PREFILL):
            assert chain.count(kind) == 0


@all_chains
async def test_namespaces_never_meet(stages: int) -> None:
    async with caching_chain(stages, lanes=4) as chain:
        for namespace in ("", "aa", "bb"):
            tokens, timings = await chain.generate(request(PROMPT, namespace=namespace))
            assert (tokens, timings.cached_tokens) == (unsplit_tokens(PROMPT, 12), 0)
        for namespace in ("bb", "", "aa"):
            tokens, timings = await chain.generate(request(PROMPT, namespace=namespace))
            assert (tokens, timings.cached_tokens) == (unsplit_tokens(PROMPT, 12), len(PROMPT))


@pytest.mark.parametrize("forgetful", [0, 1, 2])
async def test_one_stage_has_forgotten(forgetful: int) -> None:
    async with caching_chain() as chain:
        await chain.generate(request(PROMPT))
        await settled(chain, 2)
        cache = chain.cluster.stages[forgetful].context.cache
        assert cache is not None
        for entry in cache.index.entries():
            cache.forget(entry)
        for cached in (0, len(PROMPT) - 1):
            tokens, timings = await chain.generate(request(PROMPT, sampling=SAMPLED))
            assert (tokens, timings.cached_tokens) == (unsplit_tokens(PROMPT, 12, SAMPLED), cached)


@all_chains
async def test_what_the_trace_points_say(stages: int) -> None:
    async with caching_chain(stages) as chain:
        await chain.generate(request(PROMPT))
        await chain.generate(request([*PROMPT, *b" again"]))
        await chain.generate(request(PROMPT, sampling=SAMPLED))
        asked = [len(PROMPT), len(PROMPT) - 1]
        await settled(chain, 2)
        await trio.testing.wait_all_tasks_blocked()
        decisions = chain.events(names.STAGE_OPENAI_KV_LOOKUP_DECISION)
        assert [decision["decision"] for decision in decisions] == [
            "chain_prefix",
            "chain_fused_exact_prefix",
        ]
        for decision, length in zip(decisions, asked, strict=True):
            assert decision["asked_token_count"] == decision["restored_token_count"] == length
            assert decision["lookup_misses"] == decision["lookup_errors"] == 0
            assert decision["hit_stage_count"] == decision["lookup_hits"] == stages
        width = chain.cluster.stages[0].info.output_width * 4
        saved = [
            {
                "restored_token_count": length,
                "hit_stage_count": stages,
                "lookup_hits": stages,
                "lookup_misses": 0,
                "lookup_errors": 0,
                "stage0_activation_bytes_avoided": length * width,
                "inter_stage_activation_bytes_avoided": length * width * (stages - 1),
            }
            for length in asked
        ]
        events = chain.events(names.STAGE_KV_RESTORE)
        assert [{key: event[key] for key in saved[0]} for event in events] == saved
        report = await chain.generator.cache_report()
        assert report["chain"]["lookup_hits"] == 2 * stages
        assert report["chain"]["hits_by_stage"] == {str(index): 2 for index in range(stages)}


@all_chains
async def test_a_lost_lane_is_replayed_with_what_the_others_left(stages: int) -> None:
    if stages == 1:
        return  # there is no lane to be lost
    async with caching_chain(stages) as chain:
        right = unsplit_tokens(PROMPT, 12, SAMPLED)
        await chain.generate(request(PROMPT))
        await settled(chain, 2)
        for kind, nth in ((K.TRY_RESTORE_PREFILL_DECODE, 0), (K.DECODE_EMBD, 5), (K.CONFIGURE_GENERATION, 0)):
            chain.transport.fate = once(kind, nth)
            tokens, _ = await chain.generate(request(PROMPT, sampling=SAMPLED))
            assert tokens == right, kind


def once(kind: K, nth: int) -> Any:
    left = [nth]

    def fate(frame: Frame) -> Fate:
        if frame.kind != kind or frame.port != FIRST_PORT + 1 or not left:
            return None
        left[0] -= 1
        return "lose" if left[0] < 0 and left.pop() is not None else None

    return fate


@all_chains
@pytest.mark.parametrize("steps", range(0, 60, 3))
async def test_cancelled_at_any_moment(stages: int, steps: int) -> None:
    """A restore that is broken off leaves everything as it was."""
    async with caching_chain(stages) as chain:
        await chain.generate(request(PROMPT))
        await settled(chain, 2)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chain.generate, request([*PROMPT, *b" again"]))
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        for prompt in ([*PROMPT, *b" again"], PROMPT):
            tokens, _ = await chain.generate(request(prompt))
            assert tokens == unsplit_tokens(prompt, 12)


async def test_many_at_once_over_few_prompts() -> None:
    """More prompts than sequences: sessions always get one, and every answer is right."""
    async with caching_chain(lanes=3) as chain:
        prompts = [[*PROMPT[:20], number, *PROMPT[20:30]] for number in range(5)]

        async def client(first: int) -> None:
            for turn in range(8):
                prompt = prompts[(first + turn * (first + 1)) % 5]
                tokens, _ = await chain.generate(request(prompt, 6))
                assert tokens == unsplit_tokens(prompt, 6)

        async with trio.open_nursery() as nursery:
            for first in range(6):
                nursery.start_soon(client, first)
        await settled(chain, 3)
        report = await chain.generator.cache_report()
        assert report["chain"]["lookup_errors"] == 0
        assert report["chain"]["lookup_hits"] > 0


@all_chains
async def test_forgetting(stages: int) -> None:
    """On every stage, by the first digits of a namespace; what runs is not disturbed."""
    async with caching_chain(stages, lanes=4) as chain:
        for namespace in ("", "aa", "ab"):
            await chain.generate(request(PROMPT, namespace=namespace))
        await settled(chain, 4)

        def held() -> set[frozenset[str]]:
            caches = [stage.context.cache for stage in chain.cluster.stages]
            return {frozenset(e.namespace for e in cache.index.entries()) for cache in caches if cache}

        assert held() == {frozenset({"", "aa", "ab"})}
        assert await chain.generator.drop_cache("ab") == 1
        assert held() == {frozenset({"", "aa"})}
        assert await chain.generator.drop_cache("common") == 1
        assert held() == {frozenset({"aa"})}
        async with chain.generator.generate(request(PROMPT, namespace="aa")) as stream:
            tokens = [await anext(stream)]
            await chain.generator.drop_cache("all")
            assert held() == {frozenset()}
            tokens += [token async for token in stream]
        assert tokens == unsplit_tokens(PROMPT, 12)
        await settled(chain, 4)
        assert held() == {frozenset()}, "its prompt was restored before"
        _, timings = await chain.generate(request(PROMPT, 4, namespace="aa"))
        assert timings.cached_tokens == 0, "nor are the first tokens of its answer known"
        await settled(chain, 4)
        assert held() == {frozenset({"aa"})}


class TestKnownAnswers:
    """First tokens that an equal request was given: told before anything is computed."""

    async def test_they_are_told_before_anything_is_sent(self) -> None:
        right = unsplit_tokens(PROMPT, 12)
        async with caching_chain() as chain:
            await chain.generate(request(PROMPT))
            await settled(chain, 2)
            chain.transport.frames.clear()
            async with chain.generator.generate(request(PROMPT)) as stream:
                assert [await anext(stream) for _ in range(8)] == right[:8]
                assert chain.transport.frames == []
                assert [token async for token in stream] == right[8:]
            assert chain.count(K.DECODE_REPLAY_FINAL_EMBD) == 1
            assert chain.count(K.PREFILL_EMBD) == chain.count(K.DECODE_REPLAY_EMBD) == 0
            assert stream.timings.hit_kind == "chain_exact_replay"
            assert (stream.timings.cached_tokens, stream.timings.prefill_tokens) == (len(PROMPT), 0)

    @pytest.mark.parametrize("count", [1, 5, 8])
    async def test_where_they_are_all_that_is_wanted_nothing_is_sent_but_a_stop(self, count: int) -> None:
        async with caching_chain() as chain:
            await chain.generate(request(PROMPT))
            await settled(chain, 2)
            chain.transport.frames.clear()
            async with chain.generator.generate(request(PROMPT, count)) as stream:
                assert [token async for token in stream] == unsplit_tokens(PROMPT, count)
            assert (stream.finish_reason, stream.timings.cached_tokens) == ("length", len(PROMPT))
            assert {frame.kind for frame in chain.transport.frames} <= {K.STOP}

    @pytest.mark.parametrize("first", [1, 3])
    async def test_they_grow(self, first: int) -> None:
        async with caching_chain() as chain:
            for count in (first, 12, 12):
                tokens, timings = await chain.generate(request(PROMPT, count))
                assert tokens == unsplit_tokens(PROMPT, count)
            assert timings.hit_kind == "chain_exact_replay"

    async def test_what_the_stages_have_forgotten_is_computed_behind_them(self) -> None:
        async with caching_chain() as chain:
            await chain.generate(request(PROMPT))
            await settled(chain, 2)
            for stage in chain.cluster.stages:
                assert stage.context.cache is not None
                for entry in stage.context.cache.index.entries():
                    stage.context.cache.forget(entry)
            tokens, timings = await chain.generate(request(PROMPT))
            assert tokens == unsplit_tokens(PROMPT, 12)
            assert (timings.cached_tokens, timings.prefill_tokens) == (0, len(PROMPT))
            # In the shapes of the first time: rows in others would not be the same bits.
            assert chain.count(K.DECODE_REPLAY_FINAL_EMBD) == 1
            assert chain.count(K.DECODE_REPLAY_EMBD) == 8 - 1
            assert chain.count(K.PREFILL_EMBD) == 2 * 7 + 1
            for stage in chain.cluster.stages:
                assert stage.context.cache is not None
                (entry,) = stage.context.cache.index.entries()
                assert entry.schedule[:8] == (7, 7, 7, 7, 7, 7, 1, 1)

    async def test_a_lane_that_is_lost_behind_them(self) -> None:
        async with caching_chain() as chain:
            await chain.generate(request(PROMPT))
            for kind in (
                K.CONFIGURE_GENERATION,
                K.TRY_RESTORE_PREFILL,
                K.DECODE_REPLAY_FINAL_EMBD,
                K.DECODE_EMBD,
            ):
                await settled(chain, 2)
                chain.transport.fate = once(kind, 0)
                tokens, _ = await chain.generate(request(PROMPT))
                assert tokens == unsplit_tokens(PROMPT, 12), kind

    @pytest.mark.parametrize(
        "other",
        [
            {"sampling": SAMPLED},
            {"sampling": attrs.evolve(SAMPLED, temperature=0.0)},
            {"namespace": "aa"},
            {"top_logprobs": 1},
        ],
        ids=lambda other: ",".join(other),
    )
    async def test_requests_that_are_not_equal_are_computed(self, other: dict[str, Any]) -> None:
        async with caching_chain(lanes=4) as chain:
            await chain.generate(request(PROMPT))
            _, timings = await chain.generate(request(PROMPT, **other))
            assert timings.hit_kind in (None, "chain_fused_exact_prefix")
            assert timings.cached_tokens < len(PROMPT)


class TestAudits:
    """Hits that are computed all the same, as what is remembered was, and compared with it on every stage."""

    @all_chains
    async def test_what_is_right_stays(self, stages: int) -> None:
        """Another chunk size would make other chunks: those of the entry count."""
        right = unsplit_tokens(PROMPT, 12)
        async with caching_chain(stages, config=AUDITED, lanes=4) as chain:
            chain.generator.restorer._draw = lambda: 1.0
            await chain.generate(request(PROMPT))
            await settled(chain, 4)
            chain.generator.restorer._draw = lambda: 0.0
            chain.generator.prefill._options = fixed_chunks(20)
            prefills = chain.count(K.PREFILL_EMBD)
            for number in range(1, 3):
                tokens, timings = await chain.generate(request(PROMPT))
                assert (tokens, timings.cached_tokens, timings.hit_kind) == (right, 0, None)
                await settled(chain, 4)
                for stage in chain.cluster.stages:
                    assert stage.context.cache is not None
                    counters = stage.context.cache.index.counters
                    assert (counters.audits, counters.audit_failures) == (number, 0)
                    assert counters.largest_difference == 0.0
            assert chain.count(K.PREFILL_EMBD) == 3 * prefills
            assert chain.count(K.TRY_RESTORE_PREFILL) == 0

    async def test_a_part_of_a_first_chunk(self) -> None:
        """It is computed in a smaller chunk, so that a small difference passes."""
        other = [*PROMPT[:10], *b"and on another way"]
        async with caching_chain(config=AUDITED, lanes=4, chunk=30) as chain:
            chain.generator.restorer._draw = lambda: 1.0
            await chain.generate(request(PROMPT))
            await settled(chain, 4)
            spoil(chain.cluster, 1)
            chain.generator.restorer._draw = lambda: 0.0
            tokens, timings = await chain.generate(request(other))
            assert (tokens, timings.cached_tokens) == (unsplit_tokens(other, 12), 0)
            await settled(chain, 4)
            for index, stage in enumerate(chain.cluster.stages):
                assert stage.context.cache is not None
                counters = stage.context.cache.index.counters
                assert (counters.audits, counters.audit_failures) == (1, 0)
                assert counters.largest_difference == float(index == 1)

    @pytest.mark.parametrize("index", [0, 1, 2])
    async def test_what_is_wrong_is_forgotten_where_it_is_wrong(self, index: int) -> None:
        """A number in one stage's cache has changed: the audit finds it; no later answer is made of it."""
        async with caching_chain(config=AUDITED, lanes=4) as chain:
            chain.generator.restorer._draw = lambda: 1.0
            await chain.generate(request(PROMPT))
            await settled(chain, 4)
            spoil(chain.cluster, index)
            chain.generator.restorer._draw = lambda: 0.0
            tokens, _ = await chain.generate(request(PROMPT))
            assert tokens == unsplit_tokens(PROMPT, 12)
            await settled(chain, 4)
            failures = [
                stage.context.cache.index.counters.audit_failures
                for stage in chain.cluster.stages
                if stage.context.cache is not None
            ]
            assert failures == [int(number == index) for number in range(3)]
            chain.generator.restorer._draw = lambda: 1.0
            tokens, _ = await chain.generate(request(PROMPT, sampling=SAMPLED))
            assert tokens == unsplit_tokens(PROMPT, 12, SAMPLED)

    async def test_the_share(self) -> None:
        """Half of the hits; nothing else is."""
        config = attrs.evolve(AUDITED, audit_rate=0.5)
        async with caching_chain(config=config, lanes=4) as chain:
            draws = iter([0.1, 0.6, 0.4, 0.5, 0.499])
            chain.generator.restorer._draw = lambda: next(draws)
            cached = []
            for _ in range(5):
                _, timings = await chain.generate(request(PROMPT, sampling=SAMPLED))
                cached.append(timings.cached_tokens > 0)
                await settled(chain, 4)
        assert cached == [False, True, False, True, False]

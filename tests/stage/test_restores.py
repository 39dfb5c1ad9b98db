"""What one request has computed, the next one restores: on every stage, as much as all of them have."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
import trio

from skippy.config import StageOptions
from skippy.engine.toy import ToyEngine
from skippy.protocol import MessageKind, Reply, ReplyKind, ReplyStats, SamplingConfig
from skippy.stage import GenerationSettings
from skippy.stage.lane import Lane
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.support.cached import MISS, cache_of, cached_cluster, complete, configure, counters, hit
from tests.support.driver import Driver, driver_of

K = MessageKind
LAST = len(PROMPT) - 1
SEEDED = SamplingConfig(flags=1, seed=11, temperature=0.9, top_k=40, repeat_penalty=1.3, penalty_last_n=64)

all_chains = pytest.mark.parametrize("stages", [1, 2, 3])


@all_chains
@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
async def test_the_next_request_restores_what_the_last_one_left(
    stages: int, sampling: SamplingConfig | None
) -> None:
    """Prompt and answer, also under another sequence id; penalties know the restored tokens, too."""
    expected = unsplit_tokens(PROMPT, 8, sampling)
    turn = [*PROMPT, *expected[:5], *b" and then?"]
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            first = await complete(driver, PROMPT, 6, sampling=sampling)
            assert (first.restored, first.tokens) == (0, expected[:6])
            again = await complete(driver, PROMPT, 8, sampling=sampling)
            assert (again.restored, again.tokens) == (LAST, expected)
            second = await complete(driver, turn, 8, sampling=sampling)
            assert (second.restored, second.tokens) == (LAST + 6, unsplit_tokens(turn, 8, sampling))
            await wait_for_sequences(cluster)
            assert [each.hits for each in counters(cluster)] == [2] * stages


@all_chains
async def test_what_every_stage_says_of_a_hit(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            driver.request_id += 2
            prefix = PROMPT[:20] + [7] * 5
            assert await driver.ask(K.PROBE_PREFILL, 0, prefix) == Reply(
                ReplyKind.ACK, 20, stats=ReplyStats(kv_lookup_hits=stages)
            )
            assert await driver.ask(K.TRY_RESTORE_PREFILL, 0, prefix) == hit(stages, 20)
            assert await driver.ask(K.RESTORE_PREFILL, 0, prefix) == MISS, "all of it, or nothing"
            assert await driver.ask(K.RESTORE_PREFILL, 0, PROMPT[:9]) == hit(stages, 9)
            assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
            await wait_for_sequences(cluster)


async def test_stages_copy_what_they_have_at_the_same_time() -> None:
    """A stage asks the next one while its own copy is under way."""
    copying = [threading.Event(), threading.Event()]

    class Copying(ToyEngine):
        def copy(self, source: int, target: int, length: int | None = None) -> None:
            last = int(self.info.is_last)
            copying[last].set()
            assert copying[1 - last].wait(10), "the stages copy one after the other"
            super().copy(source, target, length)

    prompt = [*PROMPT[:20], *b"|goes on in another way"]
    with trio.fail_after(30):
        async with cached_cluster(2, make_engine=Copying) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            await wait_for_sequences(cluster)
            answer = await complete(driver, prompt, 6)
            assert (answer.restored, answer.tokens) == (20, unsplit_tokens(prompt, 6))
            assert [each.copies for each in counters(cluster)] == [1, 1]


@all_chains
async def test_less_than_is_worth_it_is_a_miss(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            await configure(driver)
            assert await driver.ask(K.TRY_RESTORE_PREFILL, 0, [*PROMPT[:3], 1, 2]) == MISS


@pytest.mark.parametrize("stages", [2, 3])
async def test_the_chain_settles_on_what_the_poorest_stage_has(stages: int) -> None:
    """The last stage has forgotten the longer of two prompts: its length counts, in one round trip."""
    long = [*PROMPT[:30], *b" leaps"]
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT[:20], 3)
            await complete(driver, long, 3)
            cache = cache_of(cluster, stages - 1)
            cache.forget(cache.index.match("", long).entry)
            await configure(driver)
            shorter = await driver.ask(K.TRY_RESTORE_PREFILL, 0, long[:-1])
            assert (shorter.predicted, shorter.stats.kv_lookup_misses) == (20, 0)
            await driver.ask(K.STOP)
            before = [engine.decodes for engine in cluster.engines]
            answer = await complete(driver, long, 9)
            assert (answer.restored, answer.tokens) == (20, unsplit_tokens(long, 9))
            # The others hold the rest, and its boundary: only the last stage computes the three chunks of it.
            ran = [engine.decodes - count for engine, count in zip(cluster.engines, before, strict=True)]
            assert ran == [9] * (stages - 1) + [9 + 3]
            again = await complete(driver, long, 9)
            assert (again.restored, again.tokens) == (len(long) - 1, unsplit_tokens(long, 9))


@pytest.mark.parametrize("forgetful", [0, 1, 2])
async def test_a_stage_that_has_forgotten_all_is_a_miss_for_all(forgetful: int) -> None:
    """What the stages before it had restored they give back; the request then goes on as if never asked."""
    with trio.fail_after(20):
        async with cached_cluster(3) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            cache = cache_of(cluster, forgetful)
            for entry in cache.index.entries():
                cache.forget(entry)
            answer = await complete(driver, PROMPT, 9)
            assert (answer.restored, answer.tokens) == (0, unsplit_tokens(PROMPT, 9))
            again = await complete(driver, PROMPT, 9)
            assert (again.restored, again.tokens) == (LAST, unsplit_tokens(PROMPT, 9))
            await wait_for_sequences(cluster)


@all_chains
async def test_two_namespaces_never_meet(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            for restored in (0, LAST):
                for namespace in ("", "ab", "cd"):
                    answer = await complete(driver, PROMPT, 3, namespace=namespace)
                    assert (answer.restored, answer.tokens) == (restored, unsplit_tokens(PROMPT, 3))


@pytest.mark.parametrize("asked", [{"namespace": "ab"}, {"chunks": (7,)}])
async def test_beside_a_plain_peer_a_request_does_without_what_that_one_would_mix_up(asked: Any) -> None:
    """It could not tell whose prompts are whose, nor how they were computed: nothing is kept, nor found."""
    options = StageOptions(allow_plain_generation_8=True)
    with trio.fail_after(20):
        async with (
            cached_cluster(1, options=options) as cluster,
            driver_of(cluster, plain=True) as driver,
        ):
            for _ in range(2):
                answer = await complete(driver, PROMPT, 3, **asked)
                assert (answer.restored, answer.tokens) == (0, unsplit_tokens(PROMPT, 3))
            assert cache_of(cluster, 0).index.entries() == []
            await complete(driver, PROMPT, 3)
            (entry,) = cache_of(cluster, 0).index.entries()
            assert (entry.namespace, entry.length) == ("", LAST + 3)
            await configure(driver, **asked)
            for kind in (K.PROBE_PREFILL, K.TRY_RESTORE_PREFILL, K.RESTORE_PREFILL):
                missed = await driver.ask(kind, 0, PROMPT[:12])
                assert (missed.stats.kv_lookup_hits, missed.stats.kv_lookup_misses) == (0, 1)
            await driver.ask(K.STOP)
            await configure(driver)
            whole = await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:12])
            assert whole == attrs.evolve(hit(1, 12), predicted=0)


@all_chains
async def test_a_live_prompt_is_shared(stages: int) -> None:
    """While one request is under way, another restores what they have in common."""
    others = [[*PROMPT[:25], step, *b" sleeps"] for step in range(5)]
    with trio.fail_after(20):
        async with (
            cached_cluster(stages) as cluster,
            driver_of(cluster) as driver,
            driver_of(cluster) as second,
        ):
            second.request_id = 101
            await driver.start(PROMPT)
            expected = unsplit_tokens(PROMPT, 5)
            for step, token in enumerate([PROMPT[-1], *expected[:-1]]):
                assert await driver.decode(LAST + step, token) == expected[step]
                answer = await complete(second, others[step], 6)
                assert (answer.restored, answer.tokens) == (25, unsplit_tokens(others[step], 6))


@all_chains
async def test_lanes_never_starve(stages: int) -> None:
    """What is kept makes room: for more prompts than there are sequences, one after the other and at once."""
    prompts = [[256, *f"{number} is the prompt's number{number}".encode()] for number in range(7)]
    with trio.fail_after(30):
        async with cached_cluster(stages, lane_count=2) as cluster:
            for _ in range(2):
                async with driver_of(cluster) as driver, driver_of(cluster) as second:
                    second.request_id = 101
                    for prompt in prompts:
                        async with trio.open_nursery() as nursery:
                            for each, text in ((driver, prompt), (second, prompt[::-1])):

                                async def run(each=each, text=text) -> None:
                                    answer = await complete(each, text, 4)
                                    assert answer.tokens == unsplit_tokens(text, 4)

                                nursery.start_soon(run)
            await wait_for_sequences(cluster)
            assert sum(each.evicted_resident for each in counters(cluster)) > 0


async def fused(driver: Driver, prompt: list[int]) -> Reply:
    """Ask for all of a prompt but its last token, and the first step behind it."""
    driver.prompt_tokens = len(prompt)
    position = len(prompt) - 1
    return await driver.ask(
        K.TRY_RESTORE_PREFILL_DECODE,
        position,
        prompt,
        token_count=1,
        current_token=prompt[-1],
        decode_step=0,
    )


@all_chains
@pytest.mark.parametrize("kind", [K.DECODE_REPLAY_EMBD, K.DECODE_REPLAY_FINAL_EMBD])
async def test_a_replay_goes_on_behind_a_fused_restore(stages: int, kind: MessageKind) -> None:
    """A stage in between has not seen the answer, and must not take the replay for what follows a miss."""
    other = [*PROMPT[:-2], 65, 66, 67]
    expected = unsplit_tokens(other, 2)
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 2)
            driver.request_id = 21
            await configure(driver)
            assert (await fused(driver, PROMPT)).kind is ReplyKind.PREDICTED_TOKEN
            assert (await driver.ask(K.TRIM_SESSION, token_count=LAST - 1)).kind is ReplyKind.ACK
            driver.generation = 1
            if kind is K.DECODE_REPLAY_EMBD:
                assert (await driver.ask(kind, LAST - 1, other[LAST - 1 : -1])).kind is ReplyKind.ACK
                first = await driver.decode(len(other) - 1, other[-1])
            else:
                first = (await driver.ask(kind, LAST - 1, other[LAST - 1 :])).predicted
            assert first == expected[0]
            assert await driver.decode(len(other), first) == expected[1]
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [K.DECODE_REPLAY_EMBD, K.DECODE_REPLAY_FINAL_EMBD])
async def test_a_replay_without_a_position_goes_on_at_the_end_of_a_fused_restore(
    stages: int, kind: MessageKind
) -> None:
    """Only the ends of the chain know where that is; those in between are told."""
    expected = unsplit_tokens(PROMPT, 4)
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 1)
            driver.request_id = 21
            driver.prompt_tokens = len(PROMPT)
            await configure(driver)
            assert (await fused(driver, PROMPT)).predicted == expected[0]
            driver.generation = 1
            if kind is K.DECODE_REPLAY_EMBD:
                assert (await driver.ask(kind, -1, expected[:1])).kind is ReplyKind.ACK
            else:
                assert (await driver.ask(kind, -1, expected[:1], decode_step=1)).predicted == expected[1]
            assert await driver.decode(LAST + 2, expected[1]) == expected[2]
            assert await driver.decode(LAST + 3, expected[2]) == expected[3]
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)


async def test_a_replay_without_a_position_is_refused_by_a_stage_that_has_not_seen_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a hit it goes on, behind a miss it begins at 0: that is not for a stage in between to guess."""
    failures: list[str] = []
    fail = Lane.fail

    def note(self: Lane, failure: Exception) -> None:
        if self._context.stage_index == 1:
            failures.append(str(failure))
        fail(self, failure)

    monkeypatch.setattr(Lane, "fail", note)
    with trio.fail_after(20):
        async with cached_cluster(3) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 1)
            await wait_for_sequences(cluster)
            async with driver_of(cluster, 1) as between:
                row = bytes(between.stage.info.input_width * 4)
                between.request_id = 21
                await between.send(
                    K.TRY_RESTORE_PREFILL_DECODE,
                    LAST,
                    PROMPT,
                    token_count=1,
                    current_token=PROMPT[-1],
                    decode_step=0,
                    activation=row,
                    source_stage_index=0,
                )
                between.generation = 1
                await between.send(K.DECODE_REPLAY_EMBD, -1, [65], activation=row, source_stage_index=0)
                assert await between.ended()
            await wait_for_sequences(cluster)
    assert "give its pos_start" in failures[0]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("asks_fused", [True, False])
async def test_a_trim_behind_a_miss_is_answered(stages: int, asks_fused: bool) -> None:
    """Nobody behind stage 0 has heard of the request then, and the trim is the first of it."""
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            if asks_fused:
                assert (await fused(driver, PROMPT)).kind is ReplyKind.ACK
            else:
                assert await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:-1]) == MISS
            assert (await driver.ask(K.TRIM_SESSION, token_count=0)).kind is ReplyKind.ACK
            await configure(driver)
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:-1])
            driver.prompt_tokens = len(PROMPT)
            assert [await driver.decode(LAST, PROMPT[-1])] == unsplit_tokens(PROMPT, 1)
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)


@all_chains
@pytest.mark.parametrize("configured", [True, False])
async def test_a_fused_restore_answers_with_the_first_token(stages: int, configured: bool) -> None:
    expected = unsplit_tokens(PROMPT, 9)
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 2)
            for request_id in (21, 23):
                driver.request_id = request_id
                if configured:
                    await configure(driver)
                reply = await fused(driver, PROMPT)
                assert (reply.kind, reply.predicted) == (ReplyKind.PREDICTED_TOKEN, expected[0])
                assert reply.stats.kv_lookup_hits >= 1
                assert reply.stats.kv_lookup_misses == 0
                for step in range(1, 9):
                    assert await driver.decode(LAST + step, expected[step - 1]) == expected[step]
                assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
            await wait_for_sequences(cluster)
            assert [each.hits for each in counters(cluster)] == [2] * stages


@pytest.mark.parametrize("forgetful", [0, 1, 2])
@pytest.mark.parametrize("then", ["prefill", "restore", "stop", "fused"])
async def test_a_fused_restore_that_one_stage_misses(forgetful: int, then: str) -> None:
    """The row that the others have run does not count, whatever follows."""
    with trio.fail_after(20):
        async with cached_cluster(3) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            cache = cache_of(cluster, forgetful)
            for entry in cache.index.entries():
                cache.forget(entry)
            driver.request_id += 2
            await configure(driver)
            missed = await fused(driver, PROMPT)
            assert (missed.kind, missed.stats.kv_lookup_misses) == (ReplyKind.ACK, 1)
            if then == "stop":
                assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
                answer = await complete(driver, PROMPT, 9)
                assert (answer.restored, answer.tokens) == (0, unsplit_tokens(PROMPT, 9))
                return
            if then == "fused":
                assert (await fused(driver, PROMPT)).kind is ReplyKind.ACK
            elif then == "restore":
                assert (await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:-1])).predicted == 0
            expected = unsplit_tokens(PROMPT, 5)
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:-1])
            for step, token in enumerate([PROMPT[-1], *expected[:-1]]):
                assert await driver.decode(LAST + step, token) == expected[step]
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)
            again = await complete(driver, PROMPT, 5)
            assert (again.restored, again.tokens) == (LAST, expected)


@pytest.mark.parametrize("poor", [0, 1, 2])
async def test_a_fused_restore_misses_behind_a_restore_of_less(poor: int) -> None:
    """After a miss no stage holds anything, nor what a question before it had restored."""
    longer = [*PROMPT, *b" and more"]
    expected = unsplit_tokens(longer, 5)
    with trio.fail_after(20):
        async with cached_cluster(3) as cluster, driver_of(cluster) as driver:
            await complete(driver, longer, 1)
            cache_of(cluster, poor).forget_all("all")
            await complete(driver, PROMPT, 1)
            driver.request_id += 2
            driver.prompt_tokens = len(longer)
            await configure(driver)
            some = await driver.ask(K.TRY_RESTORE_PREFILL, 0, longer[:-1])
            assert 0 < (some.predicted or 0) < len(longer) - 1
            assert (await fused(driver, longer)).kind is ReplyKind.ACK
            await driver.ask(K.PREFILL_EMBD, 0, longer[:-1])
            for step, token in enumerate([longer[-1], *expected[:-1]]):
                assert await driver.decode(len(longer) - 1 + step, token) == expected[step]
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)


@all_chains
async def test_who_takes_all_or_nothing_gets_all_or_nothing(stages: int) -> None:
    """A driver that did not agree to less than it asks for, as a plain peer never does."""
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster, whole=True) as driver:
            await complete(driver, PROMPT, 3)
            await configure(driver)
            assert (await driver.ask(K.TRY_RESTORE_PREFILL, 0, [*PROMPT[:30], 1])).stats.kv_lookup_misses == 1
            if stages > 1:
                cache = cache_of(cluster, stages - 1)
                (entry,) = cache.index.entries()
                cache.forget(entry)
                other = await driver.ask(K.STOP)
                await complete(driver, [*PROMPT[:12], 5], 1)
                await configure(driver)
                missed = await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:20])
                assert (other.kind, missed.stats.kv_lookup_misses) == (ReplyKind.ACK, 1)
            whole = await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:12])
            assert whole == attrs.evolve(hit(stages, 12), predicted=0)


@all_chains
async def test_windows_and_rewinds_behind_a_restore(stages: int) -> None:
    """Guessed tokens, right and wrong, and going back into what was restored itself."""
    expected = unsplit_tokens(PROMPT, 12)
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            driver.request_id += 2
            driver.prompt_tokens = len(PROMPT)
            await configure(driver)
            assert (await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:-1])).predicted == LAST
            await driver.verify(1, LAST, [PROMPT[-1], *expected[:2], 1, 1])
            assert (await driver.reply()).predicted_tokens[:3] == tuple(expected[:3])
            await driver.verify(2, LAST + 3, [expected[2], *expected[3:6]])
            assert (await driver.reply()).predicted_tokens == tuple(expected[3:7])
            driver.generation = 1
            other = [*PROMPT[:20], *b"else"]
            driver.prompt_tokens = len(other)
            for position in range(20, len(other) - 1):
                await driver.decode(position, other[position])
            tokens = [other[-1]]
            for step in range(6):
                tokens.append(await driver.decode(len(other) - 1 + step, tokens[-1]))
            assert tokens[1:] == unsplit_tokens(other, 6)
            assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
            await wait_for_sequences(cluster)
            for prompt in (other, PROMPT):
                answer = await complete(driver, prompt, 6)
                assert answer.tokens == unsplit_tokens(prompt, 6)


@all_chains
async def test_trimming_what_was_restored(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            for length in (17, 0):
                await configure(driver)
                assert (await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:-1])).predicted == LAST
                assert (await driver.ask(K.TRIM_SESSION, token_count=length)).kind is ReplyKind.ACK
                await driver.ask(K.PREFILL_EMBD, length, PROMPT[length:-1])
                driver.prompt_tokens = len(PROMPT)
                assert [await driver.decode(LAST, PROMPT[-1])] == unsplit_tokens(PROMPT, 1)
                await driver.ask(K.STOP)
            await wait_for_sequences(cluster)


async def test_a_prefix_does_not_fit_over_rows() -> None:
    with trio.fail_after(20):
        async with cached_cluster(2) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            driver.request_id += 2
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:9])
            await driver.send(K.TRY_RESTORE_PREFILL, 0, PROMPT[:-1])
            assert await driver.ended()
            await wait_for_sequences(cluster)


async def test_a_namespace_comes_before_what_is_done_in_it() -> None:
    with trio.fail_after(20):
        async with cached_cluster(2) as cluster, driver_of(cluster) as driver:
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:9])
            metadata = GenerationSettings(cache_namespace="ab").to_metadata()
            await driver.send(K.CONFIGURE_GENERATION, chat_sampling_metadata=metadata)
            assert await driver.ended()
            await wait_for_sequences(cluster)


@all_chains
@pytest.mark.parametrize("rows", [0, 9, LAST])
async def test_a_lane_that_ends_leaves_nothing_that_is_not_certain(stages: int, rows: int) -> None:
    """A driver that goes away without a Stop: what it had taken and not touched stays, the rest goes."""
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            async with driver_of(cluster) as other:
                other.request_id = 201
                await configure(other)
                restored = (await other.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[: rows or LAST])).predicted
                if rows:
                    await other.ask(K.PREFILL_EMBD, restored, [1, 2, 3])
            await wait_for_sequences(cluster)
            answer = await complete(driver, PROMPT, 3)
            assert answer.tokens == unsplit_tokens(PROMPT, 3)
            if not rows:
                assert answer.restored == LAST


@all_chains
async def test_what_is_kept_leaves_sessions_the_cells_that_they_may_need(stages: int) -> None:
    """Where all sequences share one pool, of 128 cells here: a session may come to 64."""
    prompts = [[256, *f"{number} is the prompt's number{number}".encode()] for number in range(4)]
    with trio.fail_after(20):
        async with (
            cached_cluster(stages, lane_count=2, ctx_size=64, kv_unified=True) as cluster,
            driver_of(cluster) as driver,
            driver_of(cluster) as second,
        ):
            caches = [cache_of(cluster, index) for index in range(stages)]
            for prompt in prompts:
                assert (await complete(driver, prompt, 2)).tokens == unsplit_tokens(prompt, 2)
                assert all(cache.index.stats().resident_tokens <= 128 for cache in caches)
            assert all(cache.index.stats().resident >= 2 for cache in caches)
            second.request_id = 101
            await driver.start(PROMPT)
            await driver.decode(LAST, PROMPT[-1])
            assert all(cache.index.stats().resident_tokens <= 64 for cache in caches)
            await second.start(PROMPT[::-1])
            await second.decode(LAST, PROMPT[0])
            assert all(cache.index.stats().resident_tokens == 0 for cache in caches)
            assert all(stage.context.scheduler.take_sequence() is None for stage in cluster.stages)

"""Verify windows through whole chains: the tokens are those of plain decoding, whatever was proposed."""

from __future__ import annotations

import pytest
import trio

from skippy.protocol import MessageKind, Reply, ReplyKind, SamplingConfig
from skippy.stage.intake import MAX_WINDOW_TOKENS
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.support.cluster import Cluster, toy_cluster
from tests.support.driver import Driver, driver_of

K = MessageKind
SEEDED = SamplingConfig(
    flags=1, seed=11, temperature=0.9, top_k=40, repeat_penalty=1.3, frequency_penalty=0.5
)
LAST = len(PROMPT) - 1
WRONG = 33

pytestmark = pytest.mark.parametrize("stages", [1, 2, 3])


def decodes(cluster: Cluster) -> list[int]:
    return [engine.decodes for engine in cluster.engines]


def answer(reply: Reply, window_id: int) -> tuple[int, ...]:
    """The tokens of a reply, which must be one to this window."""
    assert reply.kind is ReplyKind.PREDICTED_TOKENS
    assert reply.window_id == window_id
    assert reply.predicted == (reply.predicted_tokens[0] if reply.predicted_tokens else 0)
    return reply.predicted_tokens


async def stop(driver: Driver, cluster: Cluster) -> None:
    assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
    await wait_for_sequences(cluster)


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
async def test_windows_of_right_guesses(stages: int, sampling: SamplingConfig | None) -> None:
    expected = unsplit_tokens(PROMPT, 12, sampling)
    line = [PROMPT[-1], *expected]
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT, sampling)
            found: list[int] = []
            for window_id, start in ((7, 0), (8, 4), (12, 8)):
                await driver.verify(window_id, LAST + start, line[start : start + 4])
                found += answer(await driver.reply(), window_id)
            assert found == expected
            await stop(driver, cluster)


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
async def test_some_guesses_are_wrong(stages: int, sampling: SamplingConfig | None) -> None:
    """The position of what follows undoes them: on every stage, and in the sampler's history."""
    expected = unsplit_tokens(PROMPT, 16, sampling)
    line = [PROMPT[-1], *expected]
    found: list[int] = []
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT, sampling)
            for window_id in range(1, 9):
                right = window_id % 4 + 1  # tokens of the window that are right, the first one included
                start = len(found)
                tokens = [*line[start : start + right], *[WRONG] * (4 - right)]
                await driver.verify(window_id, LAST + start, tokens)
                predicted = answer(await driver.reply(), window_id)
                assert len(predicted) == 4
                taken = 0
                while taken < 3 and predicted[taken] == tokens[taken + 1]:
                    taken += 1
                found += predicted[: taken + 1]
                if len(found) >= 8:
                    break
            # A window and plain steps may alternate.
            while len(found) < 12:
                found.append(await driver.decode(LAST + len(found), line[len(found)]))
            await driver.verify(20, LAST + 12, [*line[12:14], WRONG])
            found += answer(await driver.reply(), 20)[:2]
            assert found == expected[: len(found)]
            assert len(found) == 14
            await stop(driver, cluster)


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
async def test_windows_follow_each_other_without_waiting(
    stages: int, sampling: SamplingConfig | None
) -> None:
    expected = unsplit_tokens(PROMPT, 30, sampling)
    line = [PROMPT[-1], *expected]
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT, sampling)
            starts = range(0, 30, 3)
            for window_id, start in enumerate(starts, 1):
                await driver.verify(window_id, LAST + start, line[start : start + 3])
            found: list[int] = []
            for window_id, _ in enumerate(starts, 1):
                found += answer(await driver.reply(), window_id)
            assert found == expected
            await stop(driver, cluster)


async def test_a_wrong_guess_with_windows_in_flight(stages: int) -> None:
    """What stood on the wrong guess is answered in order, and is nobody's token; then the request goes on."""
    expected = unsplit_tokens(PROMPT, 12, SEEDED)
    line = [PROMPT[-1], *expected]
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT, SEEDED)
            await driver.verify(1, LAST, [*line[:2], WRONG, WRONG])
            await driver.verify(2, LAST + 4, [WRONG] * 3)
            await driver.verify(3, LAST + 7, [WRONG])
            driver.generation += 1
            await driver.verify(4, LAST + 2, line[2:6])
            assert answer(await driver.reply(), 1)[:2] == tuple(expected[:2])
            assert len(answer(await driver.reply(), 2)) == 3
            assert len(answer(await driver.reply(), 3)) == 1
            assert answer(await driver.reply(), 4) == tuple(expected[2:6])
            assert await driver.decode(LAST + 6, line[6]) == expected[6]
            await stop(driver, cluster)


async def test_late_windows_of_the_generation_before(stages: int) -> None:
    """They come behind the frame that undid them, so they are not executed, and their answers are empty."""
    expected = unsplit_tokens(PROMPT, 8, SEEDED)
    line = [PROMPT[-1], *expected]
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT, SEEDED)
            await driver.verify(1, LAST, [line[0], WRONG])
            assert answer(await driver.reply(), 1)[0] == expected[0]
            driver.generation = 1
            assert await driver.decode(LAST + 1, line[1]) == expected[1]
            before = decodes(cluster)
            driver.generation = 0
            await driver.verify(2, LAST + 2, [WRONG] * 3)
            await driver.verify(1, LAST + 400, [WRONG])
            driver.generation = 1
            await driver.verify(3, LAST + 2, line[2:4])
            assert answer(await driver.reply(), 2) == ()
            assert answer(await driver.reply(), 1) == ()
            assert answer(await driver.reply(), 3) == tuple(expected[2:4])
            assert decodes(cluster) == [count + 1 for count in before]
            await stop(driver, cluster)


async def test_accepted_windows_are_retired(stages: int) -> None:
    """There is no reply to it, so the next reply is that of the next frame."""
    expected = unsplit_tokens(PROMPT, 8)
    line = [PROMPT[-1], *expected]
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            await driver.verify(1, LAST, line[:3])
            assert answer(await driver.reply(), 1) == tuple(expected[:3])
            await driver.send(K.RETIRE_VERIFY_WINDOW, LAST, token_count=3)
            await driver.verify(2, LAST + 3, line[3:6])
            assert answer(await driver.reply(), 2) == tuple(expected[3:6])
            await driver.send(K.RETIRE_VERIFY_WINDOW, LAST + 3, token_count=3)
            assert await driver.decode(LAST + 6, line[6]) == expected[6]
            await stop(driver, cluster)


async def test_a_range_at_a_negative_position_ends_the_lane(stages: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            await driver.verify(1, LAST, [PROMPT[-1]] * 3)
            await driver.reply()
            await driver.send(K.RETIRE_VERIFY_WINDOW, -1, token_count=1)
            assert await driver.ended()
            await wait_for_sequences(cluster)


async def test_a_window_id_out_of_order_ends_the_lane(stages: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            await driver.verify(5, LAST, [PROMPT[-1]])
            await driver.reply()
            await driver.verify(5, LAST + 1, [WRONG])
            assert await driver.ended()
            await wait_for_sequences(cluster)


async def test_the_next_request_counts_its_windows_anew(stages: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages, lane_count=1) as cluster, driver_of(cluster) as driver:
            for request_id in (3, 9):
                driver.request_id = request_id
                await driver.start(PROMPT)
                await driver.verify(1, LAST, [PROMPT[-1], WRONG])
                assert answer(await driver.reply(), 1)[:1] == tuple(unsplit_tokens(PROMPT, 1))
                await stop(driver, cluster)


async def test_the_largest_window(stages: int) -> None:
    """Wrong from the second token on, and answered to the last one."""
    expected = unsplit_tokens(PROMPT, 2)
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            await driver.verify(1, LAST, [PROMPT[-1], *[WRONG] * (MAX_WINDOW_TOKENS - 1)])
            predicted = answer(await driver.reply(), 1)
            assert len(predicted) == MAX_WINDOW_TOKENS
            assert predicted[0] == expected[0]
            assert await driver.decode(LAST + 1, expected[0]) == expected[1]
            await stop(driver, cluster)

"""Stage 0 and the answers to its verify windows, which a last stage played by the test may get wrong."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio

from skippy.engine.toy_vocabulary import TOY_TOKENS
from skippy.protocol import MessageKind, Reply, encode_reply
from skippy.protocol.kinds import MAX_VERIFY_WINDOW_PIPELINE_DEPTH
from tests.stage.test_chain import PROMPT
from tests.support.driver import Driver, dial_driver
from tests.support.scripted import ScriptedLane, scripted_peer

K = MessageKind
LAST = len(PROMPT) - 1


@contextlib.asynccontextmanager
async def answered_by_hand() -> AsyncIterator[tuple[Driver, ScriptedLane]]:
    """A driver in front of a real stage 0, whose last stage the test plays; the prompt has been run."""
    async with scripted_peer() as peer, dial_driver(peer.stage) as driver, trio.open_nursery() as nursery:
        nursery.start_soon(driver.start, PROMPT)
        lane = await peer.accept()
        await lane.configure()
        await lane.receive(K.PREFILL_EMBD)
        await lane.acknowledge()
        yield driver, lane


async def say(lane: ScriptedLane, reply: Reply) -> None:
    """A prediction of the last stage."""
    assert lane.returns is not None
    await lane.returns.send([encode_reply(reply)])


async def test_answers_come_through_in_order() -> None:
    """To open windows and to one that a rewind has undone meanwhile."""
    with trio.fail_after(20):
        async with answered_by_hand() as (driver, lane):
            await driver.verify(1, LAST, [65, 66])
            await driver.verify(2, LAST + 2, [67, 68])
            await driver.verify(9, LAST + 1, [69])
            for window_id, position in ((1, LAST), (2, LAST + 2), (9, LAST + 1)):
                frame = await lane.receive(K.VERIFY_WINDOW)
                assert (frame.state.seq_id, frame.pos_start) == (window_id, position)
            answers = [Reply.of_predicted_tokens((70, 71), 1), Reply.of_predicted_tokens((), 2)]
            answers.append(Reply.of_predicted_tokens((72,), 9))
            for answer in answers:
                await say(lane, answer)
            assert [await driver.reply() for _ in answers] == answers


@pytest.mark.parametrize(
    "answer",
    [
        Reply.of_predicted_tokens((70,), 2),
        Reply.of_predicted_tokens((70,), 0),
        Reply.of_predicted_tokens((), 1),
        Reply.of_predicted_tokens((70, 71, 72), 1),
        Reply.predicted_token(70),
        Reply.of_predicted_tokens((70, -1), 1),
        Reply.of_predicted_tokens((TOY_TOKENS,), 1),
    ],
    ids=[
        "of the next window",
        "of none",
        "without predictions",
        "with too many",
        "of another kind",
        "with no token",
        "with a token that the model lacks",
    ],
)
async def test_a_wrong_answer_ends_the_lane(answer: Reply) -> None:
    with trio.fail_after(20):
        async with answered_by_hand() as (driver, lane):
            await driver.verify(1, LAST, [65, 66])
            await driver.verify(2, LAST + 2, [67])
            await lane.receive(K.VERIFY_WINDOW)
            await lane.receive(K.VERIFY_WINDOW)
            await say(lane, answer)
            assert await driver.ended()


async def test_one_window_too_many_ends_the_lane() -> None:
    depth = MAX_VERIFY_WINDOW_PIPELINE_DEPTH
    with trio.fail_after(20):
        async with answered_by_hand() as (driver, lane):
            for index in range(depth):
                await driver.verify(index, LAST + index, [65])
                await lane.receive(K.VERIFY_WINDOW)
            await say(lane, Reply.of_predicted_tokens((66,), 0))
            assert (await driver.reply()).predicted == 66
            await driver.verify(depth, LAST + depth, [65])
            await lane.receive(K.VERIFY_WINDOW)
            await driver.verify(depth + 1, LAST + depth + 1, [65])
            assert await driver.ended()


@pytest.mark.parametrize("undone", [True, False])
async def test_a_window_that_is_not_committed_is_not_retired(undone: bool) -> None:
    with trio.fail_after(20):
        async with answered_by_hand() as (driver, lane):
            await driver.verify(1, LAST, [65, 66])
            await lane.receive(K.VERIFY_WINDOW)
            if undone:
                await driver.verify(2, LAST, [67])
                await lane.receive(K.VERIFY_WINDOW)
            await driver.send(K.RETIRE_VERIFY_WINDOW, LAST, token_count=2)
            assert await driver.ended()

"""Decode steps that the engine's thread receives itself, and how the event loop gets its link back."""

from __future__ import annotations

import socket
import threading
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, StageOptions
from skippy.engine import EngineError
from skippy.frontend.generation import GenerationError, GenerationRequest
from skippy.protocol import (
    EMPTY_STATS,
    FinishHint,
    Message,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyStats,
    StepHeader,
    Wave,
    default_state,
    encode_frame,
    encode_message,
    encode_prediction,
)
from skippy.protocol.incremental import Decoder
from skippy.stage.express import Express
from skippy.stage.inbox import Inbox
from skippy.stage.links import TcpTransport
from skippy.stage.relay import Relay
from skippy.stage.repeat import RepeatedPrediction, RepeatedStep
from skippy.stage.runs import MAX_AHEAD, ChainRun
from skippy.stage.steps import Steps
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
from tests.support.driver import Driver, driver_of

K = MessageKind
LAST = len(PROMPT) - 1


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """For each message that a relay has brought: the stage, and whether the engine's thread began it."""
    seen: list[tuple[int, bool]] = []
    original = Steps.go_on

    def go_on(self: Steps, message: Message, express: Express, on_urgent: Any) -> Express | None:
        assert threading.current_thread() is not threading.main_thread()
        following = original(self, message, express, on_urgent)
        seen.append((self._context.stage_index, following is not None))
        return following

    again = Steps.again

    def done_again(self: Steps, *args: Any) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        begun = again(self, *args)
        seen.append((self._context.stage_index, begun))
        return begun

    monkeypatch.setattr(Steps, "go_on", go_on)
    monkeypatch.setattr(Steps, "again", done_again)
    return seen


async def test_steps_behind_the_first_are_the_engines_own(taken: list[tuple[int, bool]]) -> None:
    """Of a request's steps the event loop of a stage sees the first, and what ends the relay: Stop."""
    with trio.fail_after(20):
        async with (
            toy_cluster(3, transport=TcpTransport()) as cluster,
            generator_over(cluster, lanes=1) as generator,
        ):
            for _ in range(2):
                tokens = await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=8))
                assert tokens == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)
        # Seven of eight steps follow another one, and Stop ends the relay. A stage may see one more in its
        # event loop, while what comes before it, acknowledgements or the return stream, is still settling.
        for stage in (1, 2):
            assert 12 <= taken.count((stage, True)) <= 14
            assert taken.count((stage, False)) == 2
        # Stage 0 sees one more: the step that the first prediction begins.
        assert 10 <= taken.count((0, True)) <= 12
        assert taken.count((0, False)) == 0


async def decode_in_pieces(driver: Driver, position: int, token: int, cut: int) -> int:
    """A decode step whose frame comes in two pieces."""
    state = default_state(K.DECODE_EMBD)
    message = Message(
        K.DECODE_EMBD,
        type(state)(
            phase=state.phase,
            prompt_token_count=driver.prompt_tokens,
            decode_step=driver.step(position),
            current_token=token,
        ),
        pos_start=position,
        token_count=1,
        request_id=driver.request_id,
        session_id=driver.request_id + 1,
        tokens=(token,),
    )
    frame = b"".join(bytes(part) for part in encode_frame(message, driver.stage.info.input_width))
    await driver.link.send([frame[:cut]])
    await trio.testing.wait_all_tasks_blocked()
    await driver.link.send([frame[cut:]])
    return (await driver.reply()).predicted


@pytest.mark.parametrize("cut", [1, 4, 71, 72, 74])
async def test_a_frame_may_come_in_pieces(cut: int, taken: list[tuple[int, bool]]) -> None:
    expected = unsplit_tokens(PROMPT, 4)
    with trio.fail_after(20):
        async with toy_cluster(1, transport=TcpTransport()) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            for step, token in enumerate([PROMPT[-1], *expected[:-1]]):
                assert await decode_in_pieces(driver, LAST + step, token, cut) == expected[step]
            assert await driver.ask(K.STOP) == Reply.ack()
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("broken", [1, 2])
async def test_an_engine_failure_on_the_way_ends_the_request_alone(
    broken: int, taken: list[tuple[int, bool]]
) -> None:
    with trio.fail_after(20):
        async with (
            toy_cluster(3, transport=TcpTransport()) as cluster,
            generator_over(cluster, lanes=1) as generator,
        ):
            request = GenerationRequest(prompt=PROMPT, max_tokens=200)
            async with generator.generate(request) as stream:
                for _ in range(5):
                    await stream.__anext__()
                cluster.engines[broken].fail_next = EngineError("out of luck")
                with pytest.raises(GenerationError, match="out of luck"):
                    await exhaust(stream)
            assert (broken, True) in taken
            short = GenerationRequest(prompt=PROMPT, max_tokens=8)
            assert await generate(generator, short) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


async def test_a_revoked_relay_takes_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the revocation meets the event loop, and the right to send is back."""
    relays: list[Relay[Any, Any]] = []
    original = Relay.run

    async def run(self: Relay[Any, Any]) -> Any:
        relays.append(self)
        return await original(self)

    monkeypatch.setattr(Relay, "run", run)
    expected = unsplit_tokens(PROMPT, 40)
    with trio.fail_after(20):
        async with (
            toy_cluster(2, transport=TcpTransport()) as cluster,
            generator_over(cluster, lanes=1) as generator,
        ):
            async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=40)) as stream:
                tokens = []
                async for token in stream:
                    tokens.append(token)
                    for relay in relays[-2:]:
                        relay.revoke()
            assert tokens == expected
            assert len(relays) > 10
            await wait_for_sequences(cluster)


async def test_what_is_put_behind_a_loan_revokes_it_and_leaves() -> None:
    with trio.fail_after(5):
        transport = TcpTransport()
        listener = await transport.listen(Endpoint("127.0.0.1", 0))
        dialled = await transport.connect(listener.endpoint)
        accepted = await listener.accept()
        writer = LinkWriter(dialled)
        reservation = writer.reserve()
        assert reservation is not None
        express = Express(reservation, lambda *_: [b"a"], lambda _: None)
        express.lend(express.give_back)
        express.settle(None)
        following = express.followed_by(lambda *_: [b"b"])
        following.lend(following.give_back)
        following.settle(None)
        assert writer.reserve() is None  # on loan still
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            writer.put([b"c"])
            buffer = memoryview(bytearray(1))
            assert await accepted.receive_into(buffer) == 1
            assert bytes(buffer) == b"c"
            await writer.wait_flushed()
            assert writer.reserve() is not None
            nursery.cancel_scope.cancel()
        for end in (dialled, accepted, listener):
            end.close()


def test_an_inbox_calls_who_can_receive_until_they_say_no() -> None:
    inbox = Inbox()
    near, far = socket.socketpair()
    calls: list[bytes] = []

    def ready() -> bool:
        calls.append(near.recv(1))
        return len(calls) < 2

    inbox.watch(near.fileno(), ready)
    assert inbox.watching
    far.send(b"abc")
    inbox.wait(5.0, has_work=lambda: False)
    inbox.wait(5.0, has_work=lambda: False)
    assert calls == [b"a", b"b"]
    assert not inbox.watching
    near.close()
    far.close()
    inbox.close()


def test_an_inbox_wakes_for_work_and_leaves_closed_sockets_alone() -> None:
    inbox = Inbox()
    near, far = socket.socketpair()
    number = near.fileno()

    def ready() -> bool:
        raise AssertionError("nothing has come")

    inbox.watch(number, ready)
    inbox.wait(None, has_work=lambda: True)  # does not sleep
    waker = threading.Thread(target=_wake_until, args=(inbox, woken := threading.Event()))
    waker.start()
    inbox.wait(None, has_work=lambda: False)
    woken.set()
    waker.join()
    near.close()
    inbox.unwatch(number, ready)
    inbox.unwatch(number, ready)
    assert not inbox.watching
    far.close()
    inbox.close()
    inbox.wake()


def _wake_until(inbox: Inbox, woken: threading.Event) -> None:
    while not woken.wait(0.001):
        inbox.wake()


async def test_steps_stay_within_reach_of_a_slow_reader() -> None:
    """Tokens that nobody has taken are bounded, however fast the chain is, and none is lost or doubled."""
    with trio.fail_after(30):
        async with (
            toy_cluster(3, transport=TcpTransport()) as cluster,
            generator_over(cluster, lanes=1) as generator,
        ):
            tokens = []
            async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=30)) as stream:
                async for token in stream:
                    tokens.append(token)
                    # Time enough for several rings.
                    await trio.testing.wait_all_tasks_blocked(0.005)
                    assert len(stream._decoding._tokens) <= MAX_AHEAD
            assert tokens == unsplit_tokens(PROMPT, 30)
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_lane_lost_on_the_way_loses_and_doubles_no_token(lost: int) -> None:
    """What the engine's thread had begun, and not yet reported, is not the generation's."""
    with trio.fail_after(30):
        async with (
            toy_cluster(3, transport=TcpTransport()) as cluster,
            generator_over(cluster, lanes=1) as generator,
        ):
            async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=100)) as stream:
                tokens = [await stream.__anext__() for _ in range(5)]
                for lane in cluster.stages[lost].context.lanes:
                    lane.close()
                tokens += [token async for token in stream]
            assert tokens == unsplit_tokens(PROMPT, 100)
            await wait_for_sequences(cluster)


def chain_run(steps: int, taken: int = 1000) -> tuple[ChainRun, list[tuple[int, bool]]]:
    told: list[tuple[int, bool]] = []

    def message(count: int, token: int) -> Message:
        return Message(K.DECODE_EMBD, default_state(K.DECODE_EMBD), pos_start=10 + count, tokens=(token,))

    run = ChainRun(
        steps,
        lambda token: token == 0,
        lambda token, _, goes_on: told.append((token, goes_on)),
        taken=taken,
        message=message,
        ended=lambda: None,
    )
    return run, told


def test_a_run_goes_on_for_as_many_steps_as_there_may_be() -> None:
    run, told = chain_run(3)
    for count, token in enumerate([7, 8], start=1):
        assert run.follows(token, None)
        message = run.next_message(token)
        assert (message.pos_start, message.tokens) == (10 + count, (token,))
        run.went_on(token)
    assert not run.follows(9, None)  # the third is the last there may be
    stats: list[ReplyStats] = []
    run.report(stats.append)
    run.report(stats.append)
    assert told == [(7, True), (8, True)]
    assert stats == [EMPTY_STATS, EMPTY_STATS]


def test_a_step_that_could_not_be_begun_is_still_to_come() -> None:
    run, _ = chain_run(3)
    assert run.follows(7, None)
    run.undo()
    assert run.follows(7, None)
    assert run.next_message(7).pos_start == 11


def test_a_run_ends_where_nothing_may_follow() -> None:
    assert not chain_run(9)[0].follows(0, None)
    assert not chain_run(9)[0].follows(5, ReplyAnnex(finish_hint=FinishHint.MUST_END))
    assert chain_run(9)[0].follows(5, ReplyAnnex(finish_hint=FinishHint.MAY_END))
    stopped, _ = chain_run(9)
    stopped.stopped = True
    assert not stopped.follows(5, None)


def test_a_run_counts_what_its_reader_has_taken() -> None:
    run, _ = chain_run(100, taken=-1)  # one token waits already
    for _ in range(MAX_AHEAD - 2):
        assert run.follows(5, None)
    assert not run.follows(5, None)
    run.taken += 1
    assert run.follows(5, None)


def repeated_step(width: int = 8) -> tuple[RepeatedStep, list[Any], Message]:
    """A row of ``width`` bytes behind each step; what was begun; the step after the first."""
    state = attrs.evolve(default_state(K.DECODE_EMBD), decode_step=0, current_token=5)
    first = Message(K.DECODE_EMBD, state, 7, 1, 1, 2, tokens=(5,))
    header = StepHeader.of(first)
    assert header is not None
    begun: list[Any] = []

    def again(token: int, row: memoryview | None, wave: Wave | None) -> bool:
        begun.append((token, None if row is None else bytes(row), wave))
        return token != 0

    second = attrs.evolve(
        first,
        state=attrs.evolve(state, decode_step=1, current_token=6, seq_id=3 << 8 | 2),
        pos_start=8,
        tokens=(6,),
    )
    return RepeatedStep(header, width, True, again), begun, second


def test_a_repeated_step_waits_for_the_whole_row() -> None:
    step, begun, second = repeated_step()
    header = bytes(encode_message(second)[0])
    step.buffer[: len(header)] = header
    assert step.take(len(header)) is None
    step.buffer[len(header) :] = b"12345678"
    assert step.take(len(header) + 7) is None
    assert begun == []
    assert step.take(len(header) + 8) is True
    assert begun == [(6, b"12345678", Wave(3, 2))]


def test_what_comes_behind_a_step_leaves_its_row_alone() -> None:
    """The step may still wait for its wave: only when the next one has begun is its memory free again."""
    state = attrs.evolve(default_state(K.DECODE_EMBD), decode_step=0, current_token=5)
    message = Message(K.DECODE_EMBD, state, 7, 1, 1, 2, tokens=(5,))
    header = StepHeader.of(message)
    assert header is not None
    rows: list[memoryview] = []

    def again(token: int, row: memoryview | None, _: Wave | None) -> bool:
        assert row is not None
        rows.append(row)
        return token != 9

    step = RepeatedStep(header, 8, False, again)
    for count, token in enumerate([6, 7, 8, 9], start=1):
        following = attrs.evolve(state, decode_step=count, current_token=token)
        frame = attrs.evolve(message, state=following, pos_start=7 + count, tokens=(token,))
        step.buffer[:] = bytes(encode_message(frame)[0]) + bytes([token] * 8)
        if rows:
            assert bytes(rows[-1]) == bytes([token - 1] * 8)
        assert step.take(len(step.buffer)) is (token != 9)
        assert bytes(rows[-1]) == bytes([token] * 8)
    assert bytes(rows[-2]) == bytes([8] * 8)  # the step that could not be begun has changed nothing either


@pytest.mark.parametrize("size", [1, 72, 75])
def test_less_than_a_header_is_for_others(size: int) -> None:
    step, begun, second = repeated_step()
    step.buffer[:76] = bytes(encode_message(second)[0])
    assert step.take(size) is False
    assert begun == []


def test_another_frame_is_for_others_and_the_step_still_to_come() -> None:
    step, begun, second = repeated_step(0)
    step.buffer[:] = bytes(encode_message(attrs.evolve(second, pos_start=9))[0])
    assert step.take(76) is False
    step.buffer[:] = bytes(encode_message(second)[0])
    assert step.take(76) is True
    assert begun == [(6, None, Wave(3, 2))]


def test_a_word_that_names_no_wave_is_refused() -> None:
    step, _, second = repeated_step(0)
    state = attrs.evolve(second.state, seq_id=3 << 8)
    step.buffer[:] = bytes(encode_message(attrs.evolve(second, state=state))[0])
    with pytest.raises(RemoteProtocolError, match="0 rows"):
        step.take(76)


def test_a_prediction_that_nothing_follows_is_for_others() -> None:
    run, told = chain_run(3)
    begun: list[int] = []

    def again(token: int, _: memoryview | None, __: Wave | None) -> bool:
        begun.append(token)
        return token != 9

    prediction = RepeatedPrediction(run, 100, lambda: run.report(lambda _: None), again)
    for token, taken in [(100, False), (-1, False), (0, False), (9, False), (7, True), (8, True), (7, False)]:
        prediction.buffer[:] = encode_prediction(token)
        assert prediction.take(len(prediction.buffer)) is taken, token
    assert prediction.take(10) is False
    assert begun == [9, 7, 8]
    assert told == [(7, True), (8, True)]


@pytest.mark.parametrize("stages", [2, 3])
async def test_a_relay_that_lasts_keeps_nobody_from_hearing_its_peer(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that no decoder has seen count as signs of life all the same."""
    options = StageOptions(peer_timeout_secs=1.0)
    seen: list[int] = []
    passed = Decoder.passed

    def count(self: Decoder[Any], size: int) -> None:
        seen.append(size)
        passed(self, size)

    monkeypatch.setattr(Decoder, "passed", count)
    with trio.fail_after(60):
        async with (
            toy_cluster(stages, transport=TcpTransport(), options=options) as cluster,
            generator_over(cluster, lanes=1, replay_on_stage_loss=False) as generator,
        ):
            began = trio.current_time()
            tokens = []
            request = GenerationRequest(prompt=PROMPT, max_tokens=cluster.first.info.context_length)
            while trio.current_time() < began + 2.5:
                tokens = await generate(generator, request)
            assert len(tokens) == cluster.first.info.context_length - len(PROMPT)
            assert cluster.first.context.connection_numbers() == 2  # the first lane was never replaced
            await wait_for_sequences(cluster)
    assert len(seen) > stages * 100

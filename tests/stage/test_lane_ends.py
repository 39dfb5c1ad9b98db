"""A lane that ends at the worst moment costs its own request and nothing else."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import trio
import trio.testing

from skippy.engine.toy_vocabulary import TOY_TOKENS
from skippy.frontend.admission import Admission, AdmissionGate
from skippy.frontend.chain_stream import ChainStream
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable, GenerationRequest, WorkTimedOut
from skippy.frontend.lanes import LanePool, PooledLane
from skippy.frontend.prefill import Prefill
from skippy.frontend.queueing import Demand
from skippy.frontend.restoring import Restorer
from skippy.frontend.work import Work as Generation
from skippy.protocol import (
    Message,
    MessageKind,
    PositionLogProbabilities,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    ReplyKind,
    TokenLogProbability,
    VerifyPipeline,
    default_state,
    encode_annex,
    encode_message,
    encode_reply,
)
from skippy.stage import Lane, LaneLost
from skippy.stage.context import MESSAGE_SECS
from skippy.stage.framing import receive_message, receive_reply
from skippy.stage.links import Link, LinkClosed
from skippy.stage.predictions import Predictions
from skippy.stage.returns import ReturnHub
from skippy.stage.work import Work
from skippy.telemetry import NULL_TELEMETRY
from tests.stage.test_chain import exhaust, unsplit_tokens
from tests.support.cluster import NO_REPLAY, fixed_chunks, toy_cluster
from tests.support.dialing import dial_lane
from tests.support.scripted import HookedTransport, ScriptedLane, ScriptedPeer, scripted_peer

PROMPT = [256, *b"hello"]


async def serve_request(lane: ScriptedLane) -> None:
    """Play one whole request of two tokens."""
    await lane.configure()
    await lane.receive(MessageKind.PREFILL_EMBD)
    await lane.acknowledge()
    for token in (65, 66):
        await lane.predict(token)
    await lane.stop()


async def check_serves(peer: ScriptedPeer, pool: LanePool) -> None:
    """The pool has gone on: it dials a new lane, and a request on it works."""
    async with trio.open_nursery() as nursery:
        lane = await peer.accept()
        nursery.start_soon(serve_request, lane)
        generator = ChainGenerator(peer.stage, pool, "toy", NO_REPLAY)
        async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=2)) as stream:
            assert [token async for token in stream] == [65, 66]


async def test_a_stage_that_closes_as_soon_as_it_is_ready(autojump_clock: trio.testing.MockClock) -> None:
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        for _ in range(3):
            (await peer.accept()).link.close()
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


async def test_a_fault_of_our_own_in_one_lane(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "wait_settled", lambda _: 1 / 0)
            await leave_with_owed_prediction(peer, pool)
        generator = ChainGenerator(peer.stage, pool, "toy", NO_REPLAY)
        with pytest.raises(ChainUnavailable, match="fault of this program"):
            async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=2)):
                pass
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


async def lease(pool: LanePool) -> PooledLane:
    """A lane, without an admission."""
    await pool.wait_ready()
    await trio.testing.wait_all_tasks_blocked()
    pooled = pool.take()
    assert pooled is not None
    return pooled


def stream_on(
    peer: ScriptedPeer, pool: LanePool, pooled: PooledLane, request: GenerationRequest
) -> ChainStream:
    """A generation on a lane that no gate has handed out."""
    assert peer.stage.vocabulary is not None
    options = fixed_chunks(64, replay_on_stage_loss=False)
    work = Generation(Demand(len(request.prompt), request.max_tokens), limit_secs=60)
    admission = Admission(AdmissionGate(pool, 512, options), pooled, work)
    prefill = Prefill(peer.stage, options)
    restorer = Restorer(peer.stage, pool, prefill.chunks)
    return ChainStream(admission, request, peer.stage.vocabulary, prefill, restorer, options, NULL_TELEMETRY)


async def leave_with_owed_prediction(peer: ScriptedPeer, pool: LanePool) -> tuple[PooledLane, ScriptedLane]:
    """A lane whose request has left while its first prediction is still owed."""
    lane = await peer.accept()
    pooled = await lease(pool)
    stream = stream_on(peer, pool, pooled, GenerationRequest(prompt=PROMPT[:1], max_tokens=2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.__anext__)
        await lane.configure()
        await lane.receive(MessageKind.DECODE_EMBD)
        nursery.cancel_scope.cancel()
    pooled.give_back()
    await trio.testing.wait_all_tasks_blocked()
    return pooled, lane


async def test_a_lane_that_ends_with_the_last_reply_it_owed(autojump_clock: trio.testing.MockClock) -> None:
    """The client has left; its last prediction and the end of the return stream come at once."""
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        pooled, _ = await leave_with_owed_prediction(peer, pool)
        pooled.lane.predictions.deliver_prediction(Reply.predicted_token(65))
        pooled.lane.predictions.fail_return(LaneLost("gone"))
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


async def test_a_lane_that_ends_with_the_acknowledgement_of_stop(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transport = HookedTransport()
    async with scripted_peer(inline=True, transport=transport) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        pooled, lane = await leave_with_owed_prediction(peer, pool)
        pooled.lane.predictions.deliver_prediction(Reply.predicted_token(65))
        transport.on_data = lambda: pooled.lane.fail(LaneLost("gone"))
        await lane.stop()
        transport.on_data = lambda: None
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


async def test_an_acknowledgement_that_arrives_as_the_lane_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transport = HookedTransport()
    async with scripted_peer(inline=True, transport=transport) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        lane = await peer.accept()
        pooled = await lease(pool)
        stream = stream_on(peer, pool, pooled, GenerationRequest(prompt=PROMPT, max_tokens=2))
        async with trio.open_nursery() as requests:

            async def ask() -> None:
                with pytest.raises(ChainUnavailable, match="gone"):
                    await exhaust(stream)

            requests.start_soon(ask)
            await lane.receive(MessageKind.CONFIGURE_GENERATION)
            transport.on_data = lambda: pooled.lane.fail(LaneLost("gone"))
            await lane.acknowledge()
        transport.on_data = lambda: None
        pooled.give_back()
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("chunks", [1, 40])
async def test_a_next_stage_that_takes_nothing_any_more(
    autojump_clock: trio.testing.MockClock, chunks: int
) -> None:
    """However far the prompt has come, a stalled chain ends the request; it does not wait for ever."""
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        lane = await peer.accept()
        started = trio.current_time()
        generator = ChainGenerator(peer.stage, pool, "toy", fixed_chunks(4))
        prompt = [256, *b"abcd" * chunks]
        with pytest.raises(WorkTimedOut, match="no progress for 60 s"):
            async with generator.generate(GenerationRequest(prompt=prompt, max_tokens=2)) as stream:
                await stream.__anext__()
        assert trio.current_time() - started == pytest.approx(60, abs=1)
        lane.link.close()
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


async def drive(driver: Link, count: int) -> None:
    """Send ``count`` prefill chunks of one token, as fast as they are taken."""
    kind = MessageKind.PREFILL_EMBD
    with contextlib.suppress(LinkClosed):
        for position in range(count):
            await driver.send(
                encode_message(
                    Message(
                        kind,
                        default_state(kind),
                        pos_start=position,
                        token_count=1,
                        tokens=(65,),
                        request_id=1,
                        session_id=1,
                    )
                )
            )


async def count_replies(driver: Link) -> int:
    """Read replies until the link ends."""
    decoder, count = ReplyDecoder(), 0
    with contextlib.suppress(LinkClosed):
        while await receive_reply(driver, decoder) is not None:
            count += 1
    return count


async def dial(peer: ScriptedPeer) -> Link:
    return await dial_lane(peer.stage)


async def test_a_driver_that_leaves_while_the_next_stage_is_stalled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its sequence is free at once, although the executor waits for credit."""
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        scheduler = peer.stage.context.scheduler
        driver = await dial(peer)
        nursery.start_soon(drive, driver, peer.stage.context.reply_credit + 2)
        nursery.start_soon(count_replies, driver)
        await peer.accept()
        await trio.testing.wait_all_tasks_blocked()
        assert scheduler.free_sequences == 3
        driver.close()
        await trio.testing.wait_all_tasks_blocked()
        assert scheduler.free_sequences == 4
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_peer_that_stalls_costs_its_lane_after_a_while(
    autojump_clock: trio.testing.MockClock, reads: bool
) -> None:
    """The next stage acknowledges nothing, or the driver reads no reply: neither keeps a sequence."""
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        scheduler = peer.stage.context.scheduler
        driver = await dial(peer)
        nursery.start_soon(drive, driver, 200)
        if reads:
            nursery.start_soon(count_replies, driver)
        lane = await peer.accept()

        async def acknowledge() -> None:
            with contextlib.suppress(LinkClosed):
                while await receive_message(lane.link, lane.decoder) is not None:
                    await lane.acknowledge()

        if not reads:
            nursery.start_soon(acknowledge)
        await trio.testing.wait_all_tasks_blocked()
        assert scheduler.free_sequences == 3
        await trio.sleep(MESSAGE_SECS + 1)
        assert scheduler.free_sequences == 4
        nursery.cancel_scope.cancel()


TOP = (TokenLogProbability(65, -0.1), TokenLogProbability(66, -0.2))


def scored(chosen: int, top: tuple[TokenLogProbability, ...], count: int = 1) -> bytes:
    """A prediction of token 65, with the log-probabilities of ``count`` tokens."""
    position = PositionLogProbabilities(TokenLogProbability(chosen, -0.1), top)
    annex = ReplyAnnex(log_probabilities=(position,) * count)
    return encode_annex(annex) + encode_reply(Reply.of_predicted_tokens((65,) * count))


LIES = {
    "no token": encode_reply(Reply.predicted_token(-1)),
    "nothing, as for a stale frame": encode_reply(Reply(ReplyKind.PREDICTED_TOKEN, -1)),
    "a negative token": encode_reply(Reply.predicted_token(-2)),
    "a token that the model lacks": encode_reply(Reply.predicted_token(TOY_TOKENS)),
    "the highest": encode_reply(Reply.predicted_token(2**31 - 1)),
    "one in the list": encode_reply(Reply(ReplyKind.PREDICTED_TOKEN, 65, (TOY_TOKENS,))),
    "no log-probabilities": encode_reply(Reply.predicted_token(65)),
    "too few likeliest tokens": scored(65, TOP[:1]),
    "too many": scored(65, TOP + TOP[:1]),
    "those of another token": scored(66, TOP),
    "a likeliest token that the model lacks": scored(65, (TOP[0], TokenLogProbability(TOY_TOKENS, -9.0))),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_prediction_that_cannot_be_true_ends_the_lane(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Whoever sends it is not asked again on that lane, and the client hears that a stage was lost."""
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        generator = ChainGenerator(peer.stage, pool, "toy", NO_REPLAY)
        lane = await peer.accept()

        async def lie() -> None:
            await lane.configure()
            await lane.receive(MessageKind.DECODE_EMBD)
            assert lane.returns is not None
            await lane.returns.send([LIES[name]])

        nursery.start_soon(lie)
        request = GenerationRequest(prompt=PROMPT[:1], max_tokens=2, top_logprobs=2)
        with pytest.raises(ChainUnavailable):
            async with generator.generate(request) as stream:
                await stream.__anext__()
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


async def test_a_frame_between_two_requests_finds_no_return_stream() -> None:
    """The lane's stream is there, but the next request has not said what it wants."""
    predictions = Predictions(ReturnHub(), 256, VerifyPipeline(), lambda _: None)
    kind = MessageKind.PREDICTION_RETURN_OPEN
    predictions.await_stream(3, 4)
    opening = Message(kind, default_state(kind), request_id=3, session_id=4)
    predictions.bind_return(opening, trio.CancelScope())
    predictions.check_awaited(MessageKind.DECODE_EMBD)
    await predictions.release()
    with pytest.raises(RemoteProtocolError, match="DECODE_EMBD before ConfigureGeneration"):
        predictions.check_awaited(MessageKind.DECODE_EMBD)


async def test_a_lane_that_ends_as_the_engine_is_done(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed is of no use any more, and the reason is the lane's."""
    end_lane: list[Callable[[], object]] = []
    settle = Work.settle

    def settle_and_end(work: Work) -> bool:
        while work.over and end_lane:
            end_lane.pop()()
        return settle(work)

    monkeypatch.setattr(Work, "settle", settle_and_end)
    async with toy_cluster(1, inline=True) as cluster, trio.open_nursery() as nursery:
        pool = LanePool(cluster.first, 1)
        nursery.start_soon(pool.serve)
        generator = ChainGenerator(cluster.first, pool, "toy", NO_REPLAY)
        request = GenerationRequest(prompt=PROMPT, max_tokens=2)
        async with generator.generate(request) as stream:
            lane = stream._admission.lane.lane
            end_lane += [lane._execution.drop_session, functools.partial(lane.fail, LaneLost("gone"))]
            with pytest.raises(ChainUnavailable, match="gone"):
                await exhaust(stream)
        async with generator.generate(request) as stream:
            assert [token async for token in stream] == unsplit_tokens(PROMPT, 2)
        nursery.cancel_scope.cancel()

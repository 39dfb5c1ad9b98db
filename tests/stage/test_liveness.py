"""One connection under watch: who is silent, slow, or only busy."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from skippy.protocol import MessageDecoder, encode_heartbeat
from skippy.stage.framing import FRAME_SECS, receive_message
from skippy.stage.links import LinkClosed
from skippy.stage.links.memory import MemoryLink
from skippy.stage.liveness import IDLE_SECS, LEAST_BYTES, TICK_SECS, Liveness
from skippy.stage.memory import FrameBudget, FrameMemory
from skippy.stage.writer import LinkWriter
from tests.stage.test_express import SlowLink
from tests.stage.test_frame_limits import WIDTH, frame

TIMEOUT = 10.0
BEAT = encode_heartbeat(10_000)
FRAME = frame(1)


class Watched:
    """One end of a link with room for all that is sent; the other end is the test."""

    def __init__(
        self,
        *,
        agreed: bool = True,
        live: bool = False,
        budget: FrameBudget | None = None,
    ) -> None:
        ours, self.peer = trio.testing.memory_stream_pair()
        self.agreed = agreed
        self.live = live
        self.link: MemoryLink = MemoryLink(ours, "peer")
        self.liveness = Liveness(TIMEOUT)
        self.memory = FrameMemory(budget or FrameBudget())
        self.decoder = MessageDecoder(WIDTH, allocate=self.memory.allocate, heartbeats=agreed)
        self.writer = LinkWriter(self.link)
        self.messages = 0
        self.ended = ""
        self.ended_at = 0.0

    async def run(self) -> None:
        """Read until the watch ends it; a message is done with at once."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.liveness.run)
            nursery.start_soon(self.writer.run)
            try:
                with self.liveness.watch(
                    self.link,
                    self.decoder,
                    self.writer,
                    self.memory,
                    agreed=self.agreed,
                ) as pulse:
                    pulse.live = self.live
                    while (
                        message := await receive_message(self.link, self.decoder, self.memory)
                    ) is not None:
                        self.messages += 1
                        pulse.moved = True
                        self.memory.release(len(message.activation))
            except LinkClosed as exc:
                self.ended, self.ended_at = str(exc), trio.current_time()
            nursery.cancel_scope.cancel()

    async def heard(self) -> bytes:
        """What the peer has been sent so far."""
        with trio.move_on_after(0.01):
            return bytes(await self.peer.receive_some())
        return b""


async def test_a_silent_peer_is_given_up_in_time(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    watched = Watched()
    nursery.start_soon(watched.run)
    await trio.sleep(7)
    await watched.peer.send_all(FRAME)
    await trio.sleep(TIMEOUT - 0.1)
    assert not watched.ended
    await trio.sleep(1)
    assert watched.ended == "peer sent nothing for 10 s (--peer-timeout-secs)"
    assert watched.ended_at <= 7 + TIMEOUT + TICK_SECS
    assert watched.messages == 1


async def test_heartbeats_keep_an_idle_peer_and_are_no_messages(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    watched = Watched()
    nursery.start_soon(watched.run)
    for _ in range(50):
        await watched.peer.send_all(BEAT)
        await trio.sleep(TIMEOUT - 1)
    assert not watched.ended
    assert watched.messages == 0


async def test_an_idle_link_hears_of_us_three_times_per_timeout_of_the_less_patient_side(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    for theirs, least, most in ((60_000, 27, 36), (3_000, 90, 120), (1_000, 180, 400)):
        watched = Watched()
        nursery.start_soon(watched.run)
        await watched.peer.send_all(encode_heartbeat(theirs))
        for _ in range(90):
            await trio.sleep(1)
            await watched.peer.send_all(encode_heartbeat(theirs))
        beats = await watched.heard()
        assert beats == BEAT * (len(beats) // len(BEAT))
        assert least <= len(beats) // len(BEAT) <= most


async def test_nothing_is_added_to_a_busy_link(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    watched = Watched()
    nursery.start_soon(watched.run)
    await trio.sleep(2 * TICK_SECS)
    assert await watched.heard() == BEAT
    for _ in range(60):
        watched.writer.put([FRAME])
        await watched.peer.send_all(BEAT)
        await trio.sleep(1)
    assert await watched.heard() == FRAME * 60


@pytest.mark.parametrize("every", [0.01, 1.0, 100.0])
async def test_one_byte_at_a_time_is_too_slow_for_a_decode_step(
    every: float, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    watched = Watched()
    nursery.start_soon(watched.run)
    data = frame(LEAST_BYTES // 2 // (4 * WIDTH))
    began = trio.current_time()
    for byte in data:
        await watched.peer.send_all(bytes([byte]))
        await trio.sleep(every)
        if watched.ended:
            break
    assert (
        watched.ended == "peer got on with a frame too slowly, or not at all, for 10 s (--peer-timeout-secs)"
    )
    assert watched.ended_at - began <= TIMEOUT + 2 * TICK_SECS


async def test_a_large_frame_over_a_slow_link_may_take_its_time(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """16 MB at 1 Mbit/s: two minutes in one frame."""
    watched = Watched()
    nursery.start_soon(watched.run)
    data = frame(512 * 1024)
    assert len(data) > 16 << 20
    for start in range(0, len(data), 125_000):
        await watched.peer.send_all(data[start : start + 125_000])
        await trio.sleep(1)
    assert trio.current_time() > 10 * TIMEOUT
    assert not watched.ended
    assert watched.messages == 1


async def test_a_large_piece_of_a_layer_below_may_take_its_time(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A WebSocket hands over whole messages only; it is known what has come of one."""
    watched = Watched()
    watched.link = layered = LayeredLink(watched.link)
    nursery.start_soon(watched.run)
    for _ in range(20):
        await trio.sleep(TIMEOUT / 2)
        layered.arrived = (layered.arrived or 0) + LEAST_BYTES
    assert not watched.ended
    await trio.sleep(TIMEOUT + 1)
    assert watched.ended


class LayeredLink(MemoryLink):
    """Knows what has come of what it cannot hand over yet."""

    arrived: int | None = 0

    def __init__(self, inner: MemoryLink) -> None:
        super().__init__(inner._stream, inner.peer)


async def test_many_small_frames_that_trickle_in_are_not_one_slow_frame(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Whenever the watch looks, it is inside a frame, but never in the same one."""
    watched = Watched()
    nursery.start_soon(watched.run)
    data = FRAME * 40
    for start in range(7, len(data), len(FRAME)):
        await watched.peer.send_all(data[max(0, start - len(FRAME)) : start])
        await trio.sleep(1)
    assert not watched.ended
    assert watched.messages == 39


async def test_who_cannot_be_read_for_want_of_memory_is_not_late(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    budget = FrameBudget(limit=40_000)
    await budget.take(40_000)
    watched = Watched(budget=budget)
    nursery.start_soon(watched.run)
    await watched.peer.send_all(frame(1000)[:20_000])
    await trio.sleep(20 * TIMEOUT)
    assert not watched.ended
    budget.give_back(40_000)
    await trio.sleep(TIMEOUT - 1)  # from now on the rest of the frame is due
    assert not watched.ended
    await trio.sleep(2)
    assert "got on with a frame too slowly" in watched.ended


async def test_time_in_which_nobody_looked_does_not_count(
    nursery: trio.Nursery, mock_clock: trio.testing.MockClock
) -> None:
    """The machine slept, or the event loop was held up: what the peers did meanwhile is not known."""
    watched = Watched()
    nursery.start_soon(watched.run)
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(6):
        mock_clock.jump(TICK_SECS)
        await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(100 * TIMEOUT)
    await trio.testing.wait_all_tasks_blocked()
    assert not watched.ended
    for _ in range(int(TIMEOUT / TICK_SECS) - 8):
        mock_clock.jump(TICK_SECS)
        await trio.testing.wait_all_tasks_blocked()
    assert not watched.ended
    for _ in range(4):
        mock_clock.jump(TICK_SECS)
        await trio.testing.wait_all_tasks_blocked()
    assert watched.ended


async def test_where_nothing_was_agreed_only_frames_must_end(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    watched = Watched(agreed=False)
    nursery.start_soon(watched.run)
    await trio.sleep(10_000)
    assert await watched.heard() == b""
    await watched.peer.send_all(FRAME[:-1])
    await trio.sleep(FRAME_SECS - 0.1)
    assert not watched.ended
    await trio.sleep(1)
    assert watched.ended == "peer did not finish a frame within 60 s"


async def test_heartbeats_alone_do_not_keep_a_live_request(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    watched = Watched(live=True)
    nursery.start_soon(watched.run)
    await watched.peer.send_all(FRAME)
    while not watched.ended:
        await watched.peer.send_all(BEAT)
        await trio.sleep(5)
    assert watched.ended == "peer sent nothing for 600 s while a request was live"
    assert watched.ended_at == pytest.approx(IDLE_SECS, abs=1)


# -- heartbeats and frames of the engine's thread ------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 3, 100])
async def test_a_heartbeat_passes_a_frame_that_the_engine_is_at(room: int) -> None:
    link = SlowLink(room)
    writer = LinkWriter(link)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            reservation = writer.reserve()
            assert reservation is not None
            assert writer.beat(BEAT)
            assert writer.beat(BEAT) is (room == 100)  # not before the first has left
            await trio.to_thread.run_sync(reservation.send, [b"fr", b"ame"])
            assert writer.beat(BEAT) is (room == 100)  # nor into the frame
            reservation.release()
            await writer.wait_flushed()
            beats = BEAT * (2 if room == 100 else 1)
            assert link.sent == beats + b"frame" + beats[len(BEAT) :]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("room", [0, 3, 100])
async def test_a_heartbeat_leaves_whole_where_the_frame_never_came(room: int) -> None:
    link = SlowLink(room)
    writer = LinkWriter(link)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            reservation = writer.reserve()
            assert reservation is not None
            assert writer.beat(BEAT)
            reservation.release()
            await writer.wait_flushed()
            assert link.sent == BEAT
            writer.put([b"next"])
            await writer.wait_flushed()
            assert link.sent == BEAT + b"next"
            nursery.cancel_scope.cancel()


async def test_a_heartbeat_never_tears_a_frame() -> None:
    link = SlowLink(3)
    writer = LinkWriter(link)
    writer.put([b"a frame"])
    assert not writer.beat(BEAT)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await writer.wait_flushed()
            assert link.sent == b"a frame"
            nursery.cancel_scope.cancel()

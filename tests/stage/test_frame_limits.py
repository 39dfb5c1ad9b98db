"""What a connection may hold and how long a frame may take: memory and time are bounded."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from skippy.protocol import Message, MessageDecoder, MessageKind, default_state, encode_message
from skippy.stage.framing import FRAME_SECS, receive_message
from skippy.stage.links import LinkClosed
from skippy.stage.links.memory import MemoryLink
from skippy.stage.liveness import Liveness
from skippy.stage.memory import FrameBudget, FrameMemory
from skippy.stage.writer import LinkWriter
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens
from tests.stage.test_chain_over_links import REQUEST
from tests.support.cluster import toy_cluster

WIDTH = 8


def frame(tokens: int) -> bytes:
    """A prefill frame with an activation of ``tokens`` rows, as stage 0 sends it."""
    kind = MessageKind.PREFILL_EMBD
    state = attrs.evolve(default_state(kind), source_stage_index=0)
    activation = bytes(tokens * WIDTH * 4)
    message = Message(
        kind,
        state,
        token_count=tokens,
        tokens=tuple(range(tokens)),
        activation=activation,
        request_id=1,
        session_id=2,
    )
    return b"".join(encode_message(message))


class Connection:
    """A link with a decoder at its end that takes its memory from a budget."""

    def __init__(self, budget: FrameBudget) -> None:
        ours, theirs = trio.testing.lockstep_stream_pair()
        self.peer = MemoryLink(ours, "peer")
        self.link = MemoryLink(theirs, "peer")
        self.memory = FrameMemory(budget)
        self.decoder = MessageDecoder(WIDTH, allocate=self.memory.allocate)

    async def receive(self, heartbeats: bool = False) -> Message | None:
        """The next message, under watch."""
        liveness = Liveness(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liveness.run)
            with liveness.watch(
                self.link, self.decoder, LinkWriter(self.link), self.memory, agreed=heartbeats
            ):
                message = await receive_message(self.link, self.decoder, self.memory)
            nursery.cancel_scope.cancel()
        return message


async def test_a_frame_that_does_not_end_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    connection = Connection(FrameBudget())
    data = frame(4)

    async def dribble() -> None:
        for byte in data:
            await connection.peer.send([bytes([byte])])
            await trio.sleep(1)

    assert len(data) > FRAME_SECS
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dribble)
        start = trio.current_time()
        with pytest.RaisesGroup(
            pytest.RaisesExc(LinkClosed, match="peer did not finish a frame within 60 s")
        ):
            await connection.receive()
        assert trio.current_time() - start == pytest.approx(FRAME_SECS, abs=1)
        nursery.cancel_scope.cancel()


async def test_silence_between_frames_may_last(autojump_clock: trio.testing.MockClock) -> None:
    connection = Connection(FrameBudget())

    async def send() -> None:
        for _ in range(3):
            await trio.sleep(10 * FRAME_SECS)
            await connection.peer.send([frame(1)])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        for _ in range(3):
            assert await connection.receive() is not None


async def test_who_finds_no_memory_waits_unread_and_is_not_late(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Frames larger than the decoder's own buffer: the second waits until the first is done with."""
    budget = FrameBudget(limit=40_000)
    first, second = Connection(budget), Connection(budget)
    data = frame(1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.peer.send, [data])
        message = await first.receive()
        assert message is not None
        assert budget.used == len(message.activation) == 32_000
        nursery.start_soon(second.peer.send, [data])
        received = []

        async def receive() -> None:
            received.append(await second.receive())

        nursery.start_soon(receive)
        await trio.sleep(10 * FRAME_SECS)
        assert not received
        assert budget.used == 32_000
        first.memory.release(32_000)
        await trio.testing.wait_all_tasks_blocked()
        assert len(received) == 1
        second.memory.close()
        assert budget.used == 0


async def test_a_lost_connection_gives_its_memory_back(autojump_clock: trio.testing.MockClock) -> None:
    budget = FrameBudget(limit=40_000)
    connection = Connection(budget)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.peer.send, [frame(1000)[:20_000]])
        with trio.move_on_after(1):
            await connection.receive()
        assert budget.used == 32_000
        connection.memory.close()
        connection.memory.close()
        assert budget.used == 0
        nursery.cancel_scope.cancel()


async def test_an_announcement_alone_takes_no_memory_from_others() -> None:
    budget = FrameBudget(limit=40_000)
    memory = FrameMemory(budget)
    memory.allocate(39_000)
    assert budget.used == 0
    memory.close()
    assert budget.used == 0


async def test_the_budget_goes_round_in_order_and_lets_one_large_frame_through() -> None:
    budget = FrameBudget(limit=10)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        await budget.take(size)
        order.append(name)

    with trio.fail_after(5):
        await budget.take(8)
        async with trio.open_nursery() as nursery:
            leaving = trio.CancelScope()

            async def leave() -> None:
                with leaving:
                    await budget.take(5)

            for start in (leave, lambda: take("huge", 99), lambda: take("small", 1)):
                nursery.start_soon(start)
                await trio.testing.wait_all_tasks_blocked()
            leaving.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert order == []  # one byte would fit, but it is not its turn
            budget.give_back(8)
            await trio.testing.wait_all_tasks_blocked()
            assert order == ["huge"]
            budget.give_back(99)
            await trio.testing.wait_all_tasks_blocked()
            assert order == ["huge", "small"]
            assert budget.used == 1


async def test_a_chain_holds_no_memory_for_frames_once_it_is_idle() -> None:
    with trio.fail_after(20):
        async with toy_cluster(3) as cluster, generator_over(cluster) as generator:
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert [stage.context.frame_budget.used for stage in cluster.stages] == [0, 0, 0]


async def test_memory_is_covered_at_once_where_nobody_has_to_wait() -> None:
    budget = FrameBudget(100)
    one, other = FrameMemory(budget), FrameMemory(budget)
    one.allocate(60)
    assert one.cover()
    assert one.cover()  # nothing more was announced
    assert budget.used == 60
    other.allocate(60)
    assert not other.cover()
    assert budget.used == 60
    one.release(60)
    assert other.cover()
    assert budget.used == 60
    other.close()
    assert budget.used == 0

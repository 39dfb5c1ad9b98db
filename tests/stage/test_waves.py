"""The word of a decode wave on its way through a middle stage, with neighbours that know waves or do not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import pytest
import trio

from skippy.config import Endpoint, StageOptions
from skippy.engine.toy import ToyEngine
from skippy.protocol import (
    ANNEX_EXTENSION,
    LIVENESS_EXTENSION,
    RESTORE_EXTENSION,
    WAVES_EXTENSION,
    ConnectionRole,
    Message,
    MessageDecoder,
    MessageKind as K,
    Wave,
    admit,
    default_state,
    encode_frame,
    pack_wave,
)
from skippy.stage import open_stage
from skippy.stage.admission import StageAdmission
from skippy.stage.framing import receive_message
from skippy.stage.links import Link, MemoryTransport, TcpTransport, Transport
from tests.stage.test_chain import PROMPT
from tests.stage.test_failures import read_to_end
from tests.support.admission import admit_peer, engine_admission
from tests.support.cluster import toy_cluster, toy_config
from tests.support.dialing import dial_lane
from tests.support.driver import driver_of

RANGES = [(0, 2), (2, 4), (4, 6)]
WORD = pack_wave(Wave(77, 3))


def admission_of(index: int, endpoints: list[str], heartbeats: bool = False) -> StageAdmission:
    config = toy_config(index, RANGES, endpoints)
    return engine_admission(config, ToyEngine(*RANGES[index], 6).info, heartbeats=heartbeats)


@attrs.define
class Middle:
    """A real middle stage between a stage 0 and a last stage that the test plays."""

    above: Link
    below: Link
    width: int
    decoder: MessageDecoder

    async def send(self, kind: K, position: int, *, seq_id: int, rows: int = 1) -> None:
        state = attrs.evolve(default_state(kind), seq_id=seq_id, source_stage_index=0, current_token=3)
        tokens = (3,) * rows
        message = Message(
            kind,
            state,
            pos_start=position,
            token_count=rows,
            request_id=5,
            session_id=6,
            tokens=tokens,
            activation=bytes(4 * rows * self.width),
        )
        await self.above.send(encode_frame(message, self.width))

    async def receive(self) -> Message:
        message = await receive_message(self.below, self.decoder)
        assert message is not None
        return message

    async def passes_on(self, kind: K, position: int, *, seq_id: int, rows: int = 1) -> int:
        """The word that the frame has behind the stage."""
        await self.send(kind, position, seq_id=seq_id, rows=rows)
        received = await self.receive()
        assert (received.kind, received.pos_start, received.token_count) == (kind, position, rows)
        return received.state.seq_id


@contextlib.asynccontextmanager
async def middle_stage(transport: Transport, *, above: bool, below: bool) -> AsyncIterator[Middle]:
    """With a neighbour ``above`` and one ``below`` that know waves, or do not."""
    listener = await transport.listen(Endpoint("127.0.0.1", 0))
    endpoints = ["127.0.0.1:1", "", str(listener.endpoint)]
    config = toy_config(1, RANGES, endpoints)
    last = admission_of(2, endpoints).loaded
    if not below:
        last = attrs.evolve(last, extensions=(ANNEX_EXTENSION,))
    accepted: list[Link] = []

    async def serve() -> None:
        accepted.append(await listener.accept())
        await admit_peer(accepted[0], last)

    async with open_stage(
        config, None, StageOptions(), lambda: ToyEngine(*RANGES[1], 6), transport=transport
    ) as stage:
        extensions = (WAVES_EXTENSION,) if above else ()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            link = await dial_lane(stage, *extensions)
        middle = Middle(link, accepted[0], stage.info.input_width, MessageDecoder(stage.info.output_width))
        yield middle
        link.close()
        accepted[0].close()
    listener.close()


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("transport", [TcpTransport(), MemoryTransport()], ids=["tcp", "memory"])
async def test_the_word_goes_on_only_between_neighbours_that_know_it(
    above: bool, below: bool, transport: Transport
) -> None:
    expected = WORD if above and below else 0
    with trio.fail_after(20):
        async with middle_stage(transport, above=above, below=below) as middle:
            assert await middle.passes_on(K.PREFILL_EMBD, 0, seq_id=9, rows=4) == 9
            assert await middle.passes_on(K.DECODE_EMBD, 4, seq_id=WORD) == expected
            assert await middle.passes_on(K.DECODE_READOUT, 5, seq_id=WORD) == expected
            assert await middle.passes_on(K.DECODE_LIGHT_CTX, 6, seq_id=WORD) == expected
            assert await middle.passes_on(K.DECODE_EMBD, 7, seq_id=0) == 0
            # Windows have ids of their own in that place.
            assert await middle.passes_on(K.VERIFY_WINDOW, 8, seq_id=WORD, rows=2) == WORD


@pytest.mark.parametrize("word", [-1, 0x700])
async def test_a_word_that_is_none_ends_the_lane_where_it_was_agreed(word: int) -> None:
    with trio.fail_after(20):
        async with middle_stage(MemoryTransport(), above=True, below=True) as middle:
            assert await middle.passes_on(K.PREFILL_EMBD, 0, seq_id=0, rows=4) == 0
            await middle.send(K.DECODE_EMBD, 4, seq_id=word)
            await read_to_end(middle.above)
            assert await receive_message(middle.below, middle.decoder) is None


@pytest.mark.parametrize("word", [-1, 0x700])
async def test_a_peer_without_waves_may_have_anything_in_that_place(word: int) -> None:
    with trio.fail_after(20):
        async with middle_stage(MemoryTransport(), above=False, below=True) as middle:
            assert await middle.passes_on(K.PREFILL_EMBD, 0, seq_id=0, rows=4) == 0
            assert await middle.passes_on(K.DECODE_EMBD, 4, seq_id=word) == 0


async def test_a_frame_without_rows_belongs_to_no_wave() -> None:
    """A stale frame goes on with its header alone; nobody is to wait for its row, or for others with it."""
    with trio.fail_after(20):
        async with middle_stage(MemoryTransport(), above=True, below=True) as middle:
            assert await middle.passes_on(K.PREFILL_EMBD, 0, seq_id=0, rows=4) == 0
            assert await middle.passes_on(K.DECODE_EMBD, 4, seq_id=WORD) == WORD
            assert await middle.passes_on(K.DECODE_EMBD, 5, seq_id=WORD, rows=0) == 0


def test_who_agrees() -> None:
    """Waves are between stages: no driver and no return stream has them."""
    endpoints = [f"127.0.0.1:{20_000 + index}" for index in range(3)]
    first, middle, last = (admission_of(index, endpoints, heartbeats=True) for index in range(3))
    all_of_them = (WAVES_EXTENSION, LIVENESS_EXTENSION, RESTORE_EXTENSION, ANNEX_EXTENSION)
    for dialer, listener in ((first, middle), (middle, last)):
        assert dialer.downstream is not None
        assert admit(dialer.downstream, listener.loaded).extensions == all_of_them
    assert last.stage_zero is not None
    assert last.stage_zero.role is ConnectionRole.RETURN
    assert admit(last.stage_zero, first.loaded).extensions == (LIVENESS_EXTENSION, ANNEX_EXTENSION)
    driver = attrs.evolve(last.stage_zero, role=ConnectionRole.LANE, sender_index=-1, extensions=all_of_them)
    answer = admit(driver, first.loaded)
    assert answer.refusal is None
    assert answer.extensions == all_of_them[1:]


async def test_stages_number_sequences_alike() -> None:
    """Whichever order requests reach them in: the rows of a wave then lie side by side everywhere."""
    with trio.fail_after(20):
        async with toy_cluster(3, lane_count=4, inline=True) as cluster:
            first, middle, last = (stage.context.scheduler for stage in cluster.stages)
            assert await middle.acquire_sequence() == 0
            async with driver_of(cluster) as driver:
                await driver.start(PROMPT)
                assert first.free_sequences == 3
                middle.release_sequence(0)
                # The first stage computes it in 0, which was taken on the middle one.
                assert await middle.acquire_sequence(1) == 0
                assert await last.acquire_sequence() == 0


async def test_a_sequence_that_is_wanted_is_given_if_it_is_free() -> None:
    with trio.fail_after(20):
        async with toy_cluster(1, lane_count=4, inline=True) as cluster:
            scheduler = cluster.first.context.scheduler
            assert await scheduler.acquire_sequence(2) == 2
            assert await scheduler.acquire_sequence(2) == 1  # beside it
            assert await scheduler.acquire_sequence(9) == 0
            scheduler.release_sequence(2)
            assert await scheduler.acquire_sequence(None) == 2

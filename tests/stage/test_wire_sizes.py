"""One size of a frame: what is encoded, what a conditioned link takes time for, what telemetry says."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, WireConditions
from skippy.frontend.generation import GenerationRequest
from skippy.protocol import (
    Message,
    MessageKind,
    Reply,
    SamplingConfig,
    default_state,
    encode_message,
    encode_reply,
    estimated_wire_bytes,
)
from skippy.stage.links import ConditionedTransport, MemoryTransport
from skippy.telemetry import Event, Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, generate, generator_over
from tests.support.cluster import toy_cluster

ROW = 8 * 4
HEAD = 72


def messages() -> Sequence[Message]:
    """Every kind, with all that it can carry."""
    every = []
    for kind in MessageKind:
        state = attrs.evolve(default_state(kind), source_stage_index=0)
        full = Message(kind, state, token_count=3, sampling=SamplingConfig(), chat_sampling_metadata="é")
        if kind is MessageKind.STATE_IMPORT:
            full = attrs.evolve(full, raw_bytes=b"abc")
        elif kind is not MessageKind.STOP:
            full = attrs.evolve(full, tokens=(1, 2), positions=(3,), activation=bytes(3 * ROW))
        every.append(full)
    return every


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.kind.name)
async def test_a_frame_takes_a_conditioned_link_as_long_as_its_size_says(
    message: Message, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        transport = ConditionedTransport(MemoryTransport(), WireConditions(mbps=8), nursery)
        listener = await transport.listen(Endpoint("127.0.0.1", 1))
        near = await transport.connect(listener.endpoint)
        far = await listener.accept()
        size, started = estimated_wire_bytes(message), trio.current_time()
        assert near.send_nowait(encode_message(message)) == []
        left = size
        while left:
            left -= await far.receive_into(memoryview(bytearray(left)))
        # 8 Mbit/s are a byte per microsecond.
        assert trio.current_time() - started == pytest.approx(size / 1e6)
        near.close()
        nursery.cancel_scope.cancel()


async def test_what_telemetry_says_of_sizes() -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.DEBUG, sink)
    with trio.fail_after(20):
        async with (
            trio.open_nursery() as nursery,
            toy_cluster(2, telemetry=telemetry) as cluster,
            generator_over(cluster, lanes=1, chunk=20) as generator,
        ):
            await nursery.start(telemetry.serve)
            await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=6))
            nursery.cancel_scope.cancel()
    chunks = [20, 20, len(PROMPT) - 41]
    prefill = [HEAD + rows * (4 + ROW) for rows in chunks]

    def sizes(name: str, key: str, kind: str, value: str) -> list[int]:
        events: list[Event] = [e for e in sink.events if e.name == name and e.attributes.get(key) == kind]
        return [event.attributes[value] for event in events]

    for name in (names.STAGE_BINARY_RECV, names.STAGE_BINARY_DOWNSTREAM_WRITE):
        assert sizes(name, "message_kind", "PREFILL_EMBD", "message_wire_bytes") == prefill
        assert sizes(name, "message_kind", "PREFILL_EMBD", "activation_bytes") == [n * ROW for n in chunks]
    # One token each, however long the context has become.
    decodes = sizes(names.STAGE_BINARY_RECV, "message_kind", "DECODE_EMBD", "message_wire_bytes")
    assert decodes == [HEAD + 4 + ROW] * 6
    acks = sizes(names.STAGE_BINARY_UPSTREAM_REPLY_WRITE, "reply_kind", "ACK", "reply_wire_bytes")
    assert set(acks) == {len(encode_reply(Reply.ack()))}

"""Return streams towards peers that only know generation 8: each request has one of its own."""

from __future__ import annotations

import functools

import attrs
import httpx
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, StageOptions
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.protocol import (
    READY_WORD,
    Message,
    MessageDecoder,
    MessageKind,
    Reply,
    ReplyDecoder,
    default_state,
    encode_message,
    encode_reply,
)
from skippy.stage import open_stage
from skippy.stage.framing import receive_message, receive_reply
from skippy.stage.links import Link, LinkClosed, Listener, MemoryTransport
from skippy.stage.returns import ReturnStream
from tests.frontend.support import serving
from tests.stage.test_failures import read_to_end
from tests.support.cluster import toy_cluster, toy_config
from tests.support.dialing import dial_stage
from tests.support.driver import dial_driver
from tests.support.scripted import ENDPOINTS, RANGES, ScriptedPeer, scripted_peer

K = MessageKind
PLAIN = StageOptions(allow_plain_generation_8=True)
ROW = bytes(32)


async def accept_plain(listener: Listener) -> Link:
    """The connection of a dialler that has understood that nobody here answers admission requests."""
    link = await listener.accept()
    await link.send([READY_WORD])
    link.close()
    link = await listener.accept()
    await link.send([READY_WORD])
    return link


@pytest.mark.parametrize("closes_first", [True, False], ids=["stage 0 ends it", "we end it"])
async def test_a_last_stage_of_ours_behind_a_plain_stage_zero(closes_first: bool) -> None:
    """It opens a stream for each request, and its lane outlives them."""
    transport = MemoryTransport()
    zero = await transport.listen(Endpoint.parse(ENDPOINTS[0]))
    make = functools.partial(ToyEngine, *RANGES[1], 6)
    with trio.fail_after(20):
        async with (
            open_stage(toy_config(1, RANGES, ENDPOINTS), None, PLAIN, make, transport=transport) as last,
            dial_driver(last, plain=True) as driver,
        ):
            for request_id in (3, 8, 9):
                driver.request_id = request_id
                await driver.send(K.CONFIGURE_GENERATION)
                returns = await accept_plain(zero)
                opening = await receive_message(returns, MessageDecoder(0))
                assert opening is not None
                assert (opening.kind, opening.request_id) == (K.PREDICTION_RETURN_OPEN, request_id)
                assert await driver.reply() == Reply.ack()
                await driver.send(K.DECODE_EMBD, 0, [65], activation=ROW, source_stage_index=0)
                predicted = await receive_reply(returns, ReplyDecoder())
                assert predicted is not None
                assert predicted.predicted > 0
                if closes_first:
                    returns.close()
                assert (await driver.ask(K.STOP)).kind.name == "ACK"
                if not closes_first:
                    assert await read_to_end(returns) == b""
    zero.close()


@attrs.define
class PlainLast:
    """A last stage that only knows the ready word, and dials a stream for each request."""

    peer: ScriptedPeer
    served: list[int] = attrs.field(factory=list)

    async def serve(self) -> None:
        link = await accept_plain(self.peer.listener)
        decoder = MessageDecoder(self.peer.stage.info.output_width)
        returns: Link | None = None
        while (message := await receive_message(link, decoder)) is not None:
            if message.kind is K.CONFIGURE_GENERATION:
                returns = await self.open_return(message)
            if message.kind is K.DECODE_EMBD:
                assert returns is not None
                await returns.send([encode_reply(Reply.predicted_token(65))])
                continue
            if message.kind is K.STOP:
                assert returns is not None
                returns.close()
                self.served.append(message.request_id)
            await link.send([encode_reply(Reply.ack())])

    async def open_return(self, message: Message) -> Link:
        stage = self.peer.stage
        link = await dial_stage(stage.context.transport, stage.endpoint)
        kind = K.PREDICTION_RETURN_OPEN
        ids = {"request_id": message.request_id, "session_id": message.session_id}
        await link.send(encode_message(Message(kind, default_state(kind), **ids)))
        return link


async def test_a_plain_last_stage_cannot_hold_an_answer_to_a_form() -> None:
    """The refusal reaches the client before a token, in words of its request; the next one is served."""
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    with trio.fail_after(20):
        async with scripted_peer(PLAIN) as peer, trio.open_nursery() as nursery:

            async def serve_lanes() -> None:
                while True:
                    await PlainLast(peer).serve()

            nursery.start_soon(serve_lanes)
            pool = LanePool(peer.stage, 1)
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            generator = ChainGenerator(peer.stage, pool, "toy")
            async with (
                serving(generator) as url,  # type: ignore[arg-type]
                httpx.AsyncClient(base_url=url, timeout=15) as http,
            ):
                for form, param in (
                    ({"response_format": {"type": "json_object"}}, "response_format"),
                    ({"grammar": 'root ::= "a"'}, "grammar"),
                ):
                    for stream in (False, True):
                        asked = {**body, **form, "stream": stream}
                        answer = await http.post("/v1/chat/completions", json=asked)
                        error = answer.json()["error"]
                        assert (answer.status_code, error["param"]) == (400, param)
                        assert error["message"].startswith(
                            f"{param} cannot be used: it is enforced on the last"
                        )
                        assert "plain generation-8 peer" in error["message"]
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.json()["choices"][0]["message"]["content"] == "AAA"
            nursery.cancel_scope.cancel()


async def test_stage_zero_of_ours_before_a_plain_last_stage() -> None:
    """Three requests on one lane, each with the stream that the last stage opens for it."""
    with trio.fail_after(20):
        async with scripted_peer(PLAIN) as peer, trio.open_nursery() as nursery:
            last = PlainLast(peer)
            nursery.start_soon(last.serve)
            pool = LanePool(peer.stage, 1)
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            generator = ChainGenerator(peer.stage, pool, "toy")
            for _ in range(3):
                async with generator.generate(
                    GenerationRequest(prompt=[256, 72, 73], max_tokens=3)
                ) as stream:
                    assert [token async for token in stream] == [65] * 3
            while len(last.served) < 3:
                await trio.testing.wait_all_tasks_blocked()
            assert len(set(last.served)) == 3
            assert peer.stage.context.connection_numbers() == 2, "one lane served them all"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("used", [False, True])
async def test_a_stage_zero_that_knows_no_such_request_is_told_of(used: bool) -> None:
    """Such as another one than has asked: two that share their later stages."""
    transport = MemoryTransport()
    listener = await transport.listen(Endpoint.parse("127.0.0.1:30000"))
    async with toy_cluster(2) as cluster, trio.open_nursery() as nursery:
        link = await transport.connect(Endpoint.parse("127.0.0.1:30000"))
        stream = ReturnStream(cluster.stages[1].context, link)

        async def stage_zero() -> None:
            returns = await listener.accept()
            await receive_message(returns, MessageDecoder(0))
            if used:
                await receive_reply(returns, ReplyDecoder())
            returns.close()

        nursery.start_soon(stage_zero)
        nursery.start_soon(stream.write)
        await stream.open(3, 4)
        if used:
            await stream.send(Reply.predicted_token(65))
        with pytest.raises(LinkClosed) as caught:
            await stream.watch()
        nursery.cancel_scope.cancel()
    said = "127.0.0.1:30000 closed the prediction return stream"
    asked = ", without a request that waits for it; is it the stage 0 that has asked?"
    assert str(caught.value) == (said if used else said + asked)

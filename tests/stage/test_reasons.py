"""The reason of a request that failed inside a stage reaches whoever asked, and no plain peer."""

from __future__ import annotations

import attrs
import pytest
import trio

from skippy.config import Endpoint, StageOptions
from skippy.engine import EngineError
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable, GenerationError, GenerationRequest, InvalidSampling
from skippy.frontend.lanes import LanePool
from skippy.protocol import (
    ANNEX_EXTENSION,
    AnnexedReplyDecoder,
    FailureCode,
    Message,
    MessageDecoder,
    MessageKind,
    Reply,
    RequestFailure,
    SamplingConfig,
    default_state,
    encode_frame,
    encode_message,
    encode_reply,
)
from skippy.stage import SettingsRefused, open_stage
from skippy.stage.dialing import dial_admitted
from skippy.stage.framing import receive_message, receive_reply
from skippy.stage.links import MemoryTransport, TcpTransport, Transport
from skippy.stage.reasons import encode_reason
from tests.stage.test_chain import (
    PROMPT,
    exhaust,
    generate,
    generator_over,
    unsplit_tokens,
    wait_for_sequences,
)
from tests.stage.test_failures import read_to_end
from tests.support.admission import admit_peer, engine_admission, lane_request
from tests.support.cluster import toy_cluster, toy_config
from tests.support.dialing import dial_lane
from tests.support.scripted import ENDPOINTS, scripted_peer

REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=8)


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize("started", [True, False])
async def test_the_reason_comes_up_the_chain(broken: int, started: bool) -> None:
    with trio.fail_after(20):
        async with toy_cluster(3, transport=TcpTransport()) as cluster, generator_over(cluster) as generator:
            async with generator.generate(REQUEST) as stream:
                if started:
                    await stream.__anext__()
                cluster.engines[broken].fail_next = EngineError("out of luck")
                with pytest.raises(GenerationError, match="out of luck") as caught:
                    await exhaust(stream)
                assert not isinstance(caught.value, ChainUnavailable)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("stages", [2, 3])
async def test_a_refused_setting_is_the_clients_fault_on_any_chain(stages: int) -> None:
    bad = attrs.evolve(REQUEST, sampling=SamplingConfig(flags=1, samplers=("nonsense",)))
    with trio.fail_after(20):
        async with (
            toy_cluster(stages, transport=TcpTransport()) as cluster,
            generator_over(cluster) as generator,
        ):
            with pytest.raises(InvalidSampling, match="nonsense"):
                await generate(generator, bad)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)


@pytest.mark.parametrize("asks", ["annex", "no extension", "plain"])
async def test_only_a_peer_that_agreed_gets_the_reason(asks: str) -> None:
    kind = MessageKind.PREFILL_EMBD
    chunk = Message(kind, default_state(kind), request_id=7, session_id=8, token_count=1, tokens=(1,))
    with trio.fail_after(20):
        options = StageOptions(allow_plain_generation_8=True)
        async with toy_cluster(1, options=options, transport=TcpTransport()) as cluster:
            request = lane_request(cluster.first)
            if asks == "annex":
                request = attrs.evolve(request, extensions=(ANNEX_EXTENSION,))
            link, extensions = await dial_admitted(
                cluster.transport,
                cluster.first.endpoint,
                token=None,
                source_host=None,
                timeout_secs=5,
                request=None if asks == "plain" else request,
            )
            assert extensions == {"annex": (ANNEX_EXTENSION,), "plain": None}.get(asks, ())
            cluster.engines[0].fail_next = EngineError("out of luck")
            await link.send(encode_message(chunk))
            if asks != "annex":
                assert await read_to_end(link) == encode_reply(Reply.ack())
                return
            decoder = AnnexedReplyDecoder()
            assert await receive_reply(link, decoder) == Reply.ack()
            assert await receive_reply(link, decoder) is None
            assert decoder.failure == RequestFailure(7, FailureCode.FAILED, "out of luck")


async def test_the_last_stage_tells_stage_zero_itself() -> None:
    """On the return stream, so that nobody has to carry the reason up: here nobody does."""
    transport = TcpTransport()
    with trio.fail_after(20):
        async with (
            scripted_peer(transport=transport, endpoints=["127.0.0.1:0", "127.0.0.1:0"]) as peer,
            trio.open_nursery() as nursery,
        ):
            pool = LanePool(peer.stage, 1)
            nursery.start_soon(pool.serve)
            lane = await peer.accept()

            async def fail() -> None:
                await lane.configure()
                assert lane.returns is not None
                await lane.returns.send([encode_reason(0, SettingsRefused("no such sampler"))])

            nursery.start_soon(fail)
            generator = ChainGenerator(peer.stage, pool, "toy")
            with pytest.raises(InvalidSampling, match="no such sampler"):
                await generate(generator, REQUEST)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("annexed", [True, False])
@pytest.mark.parametrize("transport", [TcpTransport(), MemoryTransport()], ids=["tcp", "memory"])
async def test_a_failed_request_of_the_last_stage_is_told_on_its_return_stream(
    annexed: bool, transport: Transport
) -> None:
    """What the return stream brings, as whoever plays stage 0 sees it."""
    ranges = [(0, 3), (3, 6)]
    with trio.fail_after(20):
        listener = await transport.listen(Endpoint("127.0.0.1", 0))
        config = toy_config(1, ranges, [str(listener.endpoint), ""])
        engine = ToyEngine(3, 6, 6)
        async with open_stage(config, None, StageOptions(), lambda: engine, transport=transport) as stage:
            first = engine_admission(toy_config(0, ranges, ENDPOINTS), ToyEngine(0, 3, 6).info)
            kind = MessageKind.CONFIGURE_GENERATION
            lane = await dial_lane(stage)
            await lane.send(encode_message(Message(kind, default_state(kind), request_id=7, session_id=8)))
            returns = await listener.accept()
            loaded = first.loaded if annexed else attrs.evolve(first.loaded, extensions=())
            await admit_peer(returns, loaded)
            opening = await receive_message(returns, MessageDecoder(0))
            assert opening is not None
            assert (opening.request_id, opening.session_id) == (7, 8)
            engine.fail_next = EngineError("out of luck")
            kind = MessageKind.PREFILL_EMBD
            state = attrs.evolve(default_state(kind), source_stage_index=0)
            chunk = Message(
                kind,
                state,
                request_id=7,
                session_id=8,
                token_count=1,
                tokens=(1,),
                activation=bytes(4 * stage.info.input_width),
            )
            await lane.send(encode_frame(chunk, stage.info.input_width))
            decoder = AnnexedReplyDecoder()
            assert await receive_reply(returns, decoder) is None
            reason = RequestFailure(7, FailureCode.FAILED, "out of luck")
            assert decoder.failure == (reason if annexed else None)
            assert await read_to_end(returns) == b""
            lane.close()
        listener.close()

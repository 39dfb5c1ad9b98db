"""The reason of a request that failed inside a stage reaches whoever asked, and no plain peer."""

from __future__ import annotations

import attrs
import pytest
import trio

from skippy.config import StageOptions
from skippy.engine import EngineError
from skippy.frontend.generation import ChainUnavailable, GenerationError, GenerationRequest, InvalidSampling
from skippy.protocol import (
    ANNEX_EXTENSION,
    AnnexedReplyDecoder,
    FailureCode,
    Message,
    MessageKind,
    Reply,
    RequestFailure,
    SamplingConfig,
    default_state,
    encode_message,
    encode_reply,
)
from skippy.stage.dialing import dial_admitted
from skippy.stage.framing import receive_reply
from skippy.stage.links import TcpTransport
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens, wait_for_sequences
from tests.stage.test_failures import read_to_end
from tests.support.admission import lane_request
from tests.support.cluster import toy_cluster

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
                    await stream.__anext__()
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

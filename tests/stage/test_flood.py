"""More connections than a stage serves: who belongs to the chain still gets in, and stays in."""

from __future__ import annotations

import pytest
import trio

from skippy.config import StageOptions
from skippy.stage import accepting
from skippy.stage.context import HANDSHAKE_SECS
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens
from tests.stage.test_chain_over_links import REQUEST
from tests.support.cluster import toy_cluster
from tests.support.dialing import dial_stage


async def test_silent_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "SPARE_CONNECTIONS", 4)
    options = StageOptions(link_token="secret")
    with trio.fail_after(HANDSHAKE_SECS / 2):  # so not by waiting for the silent ones to be given up
        async with toy_cluster(3, scheme="tcp", options=options) as cluster:
            silent = []

            async def flood() -> None:
                for stage in cluster.stages:
                    for _ in range(20):
                        address = stage.endpoint.host, stage.endpoint.port
                        silent.append(await trio.open_tcp_stream(*address))

            await flood()
            async with generator_over(cluster, lanes=4) as generator:
                await flood()
                assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
                assert cluster.first.context.connection_numbers() == 5  # four lanes, none replaced
            for stream in silent:
                await stream.aclose()


async def test_the_longest_stranger_is_the_one_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "SPARE_CONNECTIONS", 1)
    options = StageOptions(link_token="secret")
    with trio.fail_after(HANDSHAKE_SECS / 2):
        async with toy_cluster(1, scheme="tcp", options=options, lane_count=1) as cluster:
            endpoint = cluster.first.endpoint
            admitted = await dial_stage(cluster.transport, endpoint, token=b"secret")
            streams = [await trio.open_tcp_stream(endpoint.host, endpoint.port) for _ in range(3)]
            for stream in streams[:2]:
                assert await stream.receive_some(1) == b""
            with trio.move_on_after(0.1) as scope:
                await streams[2].receive_some(1)
            assert scope.cancelled_caught
            with trio.move_on_after(0.1) as scope:
                await admitted.receive_into(memoryview(bytearray(1)))
            assert scope.cancelled_caught
            admitted.close()
            for stream in streams:
                await stream.aclose()

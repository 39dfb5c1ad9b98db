"""The chain of toy stages over every link backend: same tokens, two clients, and a cut that heals."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial

import attrs
import pytest
import trio
import trio.testing

from skippy.config import ConfigError, Endpoint, StageOptions
from skippy.engine import EngineError
from skippy.engine.toy import ToyEngine
from skippy.frontend.generation import GenerationError, GenerationRequest, InvalidSampling
from skippy.frontend.lanes import LanePool
from skippy.protocol import SamplingConfig
from skippy.stage import Stage, open_stage
from skippy.stage.links import Link, Listener, MemoryTransport, StageLinks, Transport, open_links
from skippy.stage.upstream import HANDSHAKE_SECS
from tests.stage.test_chain import (
    PROMPT,
    exhaust,
    generate,
    generator_over,
    unsplit_tokens,
    wait_for_sequences,
)
from tests.support.certificates import Certificates
from tests.support.cluster import Cluster, toy_cluster, toy_config

REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=8)
BACKENDS = ["memory", "tcp", "tls", "mutual tls", "ws", "wss", "conditioned memory", "conditioned wss"]


@attrs.frozen
class Backend:
    """What a chain needs to run over one kind of link; ``scheme`` None: in memory."""

    options: StageOptions
    scheme: str | None


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, certificates: Certificates) -> Backend:
    return make_backend(request.param, certificates)


def make_backend(name: str, certificates: Certificates) -> Backend:
    words = name.split()
    scheme = None if words[-1] == "memory" else words[-1]
    options = StageOptions(link_token="secret")
    if scheme in ("tls", "wss"):
        files = certificates.files()
        options = attrs.evolve(options, tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    if words[0] == "conditioned":
        options = attrs.evolve(
            options, downstream_wire_delay_ms=1, downstream_wire_mbps=1000, downstream_wire_jitter_ms=0.5
        )
    return Backend(options, scheme)


@attrs.define
class Cuttable(Transport):
    """Remembers the links that are dialled, and can cut them all."""

    inner: Transport
    links: list[Link] = attrs.field(factory=list)

    async def listen(self, endpoint: Endpoint) -> Listener:
        return await self.inner.listen(endpoint)

    def adopt(self, sock: socket.socket, scheme: str) -> Listener:
        return self.inner.adopt(sock, scheme)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        link = await self.inner.connect(endpoint, source_host=source_host)
        self.links.append(link)
        return link

    def cut(self) -> None:
        for link in self.links:
            link.close()
        self.links.clear()


@contextlib.asynccontextmanager
async def chain(backend: Backend) -> AsyncIterator[tuple[Cluster, Cuttable]]:
    memory = MemoryTransport() if backend.scheme is None else None
    async with open_links(backend.options, memory) as links:
        cuttable = Cuttable(links.transport)
        async with toy_cluster(
            3, options=backend.options, transport=cuttable, scheme=backend.scheme
        ) as cluster:
            yield cluster, cuttable


async def test_same_tokens_for_two_clients_and_a_cut_heals(backend: Backend) -> None:
    seeded = SamplingConfig(flags=1, seed=11, temperature=0.9, top_k=40)
    results: dict[str, list[int]] = {}

    async def client(name: str, request: GenerationRequest) -> None:
        results[name] = await generate(generator, request)

    with trio.fail_after(30):
        async with chain(backend) as (cluster, cuttable):
            async with generator_over(cluster) as generator:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client, "greedy", REQUEST)
                    sampled = attrs.evolve(REQUEST, sampling=seeded)
                    nursery.start_soon(client, "seeded", sampled)
                assert results["greedy"] == unsplit_tokens(PROMPT, 8)
                assert results["seeded"] == unsplit_tokens(PROMPT, 8, seeded)
                async with generator.generate(REQUEST) as stream:
                    await stream.__anext__()
                    cuttable.cut()
                    tokens = [token async for token in stream]
                assert tokens == unsplit_tokens(PROMPT, 8)[1:]
                assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


async def test_annexes_come_over_every_link(backend: Backend) -> None:
    """Why a request failed, wherever it did, and log-probabilities."""
    bad = attrs.evolve(REQUEST, sampling=SamplingConfig(flags=1, samplers=("nonsense",)))
    with trio.fail_after(30):
        async with chain(backend) as (cluster, _), generator_over(cluster) as generator:
            with pytest.raises(InvalidSampling, match="nonsense"):
                await generate(generator, bad)
            for engine in cluster.engines:
                async with generator.generate(attrs.evolve(REQUEST, top_logprobs=2)) as stream:
                    await stream.__anext__()
                    assert stream.logprobs is not None
                    engine.fail_next = EngineError("out of luck")
                    with pytest.raises(GenerationError, match="out of luck"):
                        await exhaust(stream)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)


@pytest.mark.parametrize("scheme", ["tcp", "tls", "ws", "wss"])
async def test_stages_choose_the_transport_by_the_scheme(certificates: Certificates, scheme: str) -> None:
    """Without a transport of the host's, as processes do; and the return stream takes the same way."""
    backend = make_backend(scheme, certificates)
    with trio.fail_after(30):
        async with (
            toy_cluster(2, options=backend.options, scheme=backend.scheme) as cluster,
            generator_over(cluster) as generator,
        ):
            assert [stage.endpoint.scheme for stage in cluster.stages] == [backend.scheme] * 2
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)


async def test_a_slow_wire_delays_what_goes_down_and_nothing_else(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two stages, one second down, nothing back: the first token after one prefill and one decode overlap."""
    options = StageOptions(downstream_wire_delay_ms=1000)
    async with (
        toy_cluster(2, options=options, inline=True) as cluster,
        generator_over(cluster, lanes=1, chunk=64) as generator,
        generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=4)) as stream,
    ):
        start = trio.current_time()
        times = [round(trio.current_time() - start, 3) async for _ in stream]
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == [1.0, 1.0, 1.0]


async def test_a_slow_handshake_keeps_nobody_else_out(certificates: Certificates) -> None:
    """Peers that connect and say nothing, or not what TLS says, while others are served."""
    files = certificates.files()
    options = StageOptions(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    with trio.fail_after(HANDSHAKE_SECS):
        async with toy_cluster(2, options=options, scheme="tls") as cluster:
            endpoints = [stage.endpoint for stage in cluster.stages]
            silent = [await trio.open_tcp_stream(e.host, e.port) for e in endpoints for _ in range(20)]
            for stream in silent[::2]:
                await stream.send_all(b"\x16\x03\x01")
            async with generator_over(cluster) as generator:
                assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            for stream in silent:
                await stream.aclose()


async def test_tls_files_are_read_before_anything_is_bound(certificates: Certificates) -> None:
    files = certificates.files()
    options = StageOptions(tls_cert=files.cert, tls_key=files.ca, tls_ca=files.ca)
    with pytest.raises(ConfigError, match="tls_cert: "):
        async with toy_cluster(1, options=options, scheme="tls"):
            pass


async def test_an_unknown_scheme_is_refused_by_name() -> None:
    async with open_links(StageOptions()) as links:
        assert isinstance(links, StageLinks)
        with pytest.raises(ConfigError, match=r"scheme udp:// is unknown; use one of tcp://, tls://, ws://"):
            await links.transport.connect(Endpoint("127.0.0.1", 1, "udp"))


@pytest.mark.parametrize(
    ("host", "scheme", "token", "ca", "said"),
    [
        ("127.0.0.1", "tcp", None, False, None),
        ("0.0.0.0", "tcp", None, False, "ANYONE WHO REACHES THIS ADDRESS"),
        ("0.0.0.0", "tcp", "secret", False, "not encrypted"),
        ("0.0.0.0", "ws", None, False, "ANYONE WHO REACHES THIS ADDRESS"),
        ("0.0.0.0", "tls", None, False, "ANYONE WHO REACHES THIS ADDRESS"),
        ("0.0.0.0", "tls", "secret", False, None),
        ("0.0.0.0", "wss", None, True, None),
    ],
)
async def test_a_stage_open_to_a_network_says_so(
    caplog: pytest.LogCaptureFixture,
    certificates: Certificates,
    host: str,
    scheme: str,
    token: str | None,
    ca: bool,
    said: str | None,
) -> None:
    files = certificates.files()
    options = StageOptions(link_token=token)
    if scheme in ("tls", "wss"):
        tls_ca = files.ca if ca else None
        options = attrs.evolve(options, tls_cert=files.cert, tls_key=files.key, tls_ca=tls_ca)
    config = attrs.evolve(toy_config(0, [(0, 6)], [""]), bind_addr=f"{scheme}://{host}:0")
    with trio.fail_after(10):
        async with open_stage(config, None, options, lambda: ToyEngine(0, 6, 6), inline=True):
            pass
    warnings = [str(record.msg) for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


async def test_a_certificate_that_is_refused_is_told_at_once(
    caplog: pytest.LogCaptureFixture, certificates: Certificates
) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    endpoints = [f"tls://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    ranges = [(0, 3), (3, 6)]

    def stage(index: int, cert: str) -> AbstractAsyncContextManager[Stage]:
        files = certificates.files(cert=cert)
        options = StageOptions(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
        config = toy_config(index, ranges, endpoints)
        make = partial(ToyEngine, *ranges[index], 6)
        return open_stage(config, None, options, make, listen_socket=sockets[index], inline=True)

    with trio.fail_after(20):
        async with stage(1, "stranger"), stage(0, "chain") as first, trio.open_nursery() as nursery:
            pool = LanePool(first, 4)
            nursery.start_soon(pool.serve)
            while "certificate is not accepted" not in (pool.unready or ""):
                await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
    said = [record.msg for record in caplog.records if "dialling the next stage failed" in str(record.msg)]
    assert [log["endpoint"] for log in said if isinstance(log, dict)] == [endpoints[1]]


async def test_peers_that_are_slow_inside_a_frame_cost_others_nothing() -> None:
    """Real sockets: the first bytes of a frame each, held open, while the chain serves."""
    with trio.fail_after(30):
        async with toy_cluster(2, scheme="tcp") as cluster, generator_over(cluster) as generator:
            slow = []
            for stage in cluster.stages:
                for _ in range(10):
                    stream = await trio.open_tcp_stream(stage.endpoint.host, stage.endpoint.port)
                    await stream.send_all(b"\x01\x00")
                    slow.append(stream)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            for stream in slow:
                await stream.aclose()
            await wait_for_sequences(cluster)

"""A whole chain of toy stages inside one test process."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import attrs

from skippy.config import OpenAIOptions, PeerConfig, StageConfig, StageOptions, StagePlacement, StageTopology
from skippy.engine import StageEngine
from skippy.engine.toy import ToyEngine
from skippy.kv.identity import stage_identity
from skippy.kv.settings import extra_sequences
from skippy.stage import Stage, open_stage
from skippy.stage.admission import ModelIdentity, identify_engine
from skippy.stage.links import MemoryTransport, TcpTransport, Transport
from skippy.telemetry import NULL_TELEMETRY, Telemetry

LAYERS = 6


NO_REPLAY = OpenAIOptions(replay_on_stage_loss=False)
"""An endpoint whose requests end with the lane that they are on."""


def fixed_chunks(size: int, **keys: Any) -> OpenAIOptions:
    """An endpoint that cuts every prompt into chunks of ``size``."""
    return OpenAIOptions(prefill_chunk_policy="fixed", prefill_chunk_size=size, **keys)


def toy_config(
    index: int, ranges: Sequence[tuple[int, int]], endpoints: Sequence[str], **keys: Any
) -> StageConfig:
    """The configuration of one stage of a chain; neighbours that have no endpoint yet are left out."""

    def peer(other: int) -> PeerConfig | None:
        if 0 <= other < len(ranges) and endpoints[other]:
            return PeerConfig(stage_id=f"stage-{other}", stage_index=other, endpoint=endpoints[other])
        return None

    start, end = ranges[index]
    return StageConfig(
        run_id="test",
        topology_id="test",
        model_id="toy",
        stage_id=f"stage-{index}",
        stage_index=index,
        layer_start=start,
        layer_end=end,
        load_mode="runtime-slice",
        model_path="none.gguf",
        bind_addr=endpoints[index] or "127.0.0.1:0",
        upstream=peer(index - 1),
        downstream=peer(index + 1),
        **keys,
    )


def toy_topology(ranges: Sequence[tuple[int, int]], endpoints: Sequence[str]) -> StageTopology:
    return StageTopology(
        topology_id="test",
        model_id="toy",
        stages=tuple(
            StagePlacement(
                stage_id=f"stage-{index}",
                stage_index=index,
                endpoint=endpoint,
                layer_start=start,
                layer_end=end,
                load_mode="runtime-slice",
            )
            for index, ((start, end), endpoint) in enumerate(zip(ranges, endpoints, strict=True))
        ),
    )


def ranges_of(stages: int, layers: int = LAYERS) -> list[tuple[int, int]]:
    size = layers // stages
    return [(i * size, layers if i == stages - 1 else (i + 1) * size) for i in range(stages)]


@attrs.define
class Cluster:
    """Running stages, first to last, with the engines they use."""

    stages: list[Stage]
    engines: list[ToyEngine]
    transport: Transport

    @property
    def first(self) -> Stage:
        return self.stages[0]

    @property
    def free_sequences(self) -> list[int]:
        return [stage.context.scheduler.free_sequences for stage in self.stages]


def _identity_of(config: StageConfig, layers: int) -> ModelIdentity | None:
    """Toy engines have no file; where states are kept on disk, their shape is all that there is to know."""
    if config.kv_cache is None or config.kv_cache.directory is None:
        return None
    info = ToyEngine(config.layer_start, config.layer_end, layers).info
    readers = stage_identity(config, weights="0" * 64, rules="none", backend="toy", threads=1)
    return attrs.evolve(identify_engine(config, info), state_readers=readers)


@contextlib.asynccontextmanager
async def toy_cluster(
    stages: int = 3,
    *,
    options: StageOptions | None = None,
    transport: Transport | None = None,
    scheme: str | None = None,
    inline: bool = False,
    make_engine: Callable[..., Any] = ToyEngine,
    layers: int = LAYERS,
    telemetry: Telemetry = NULL_TELEMETRY,
    ending_secs: float = 20.0,
    **keys: Any,
) -> AsyncIterator[Cluster]:
    """A chain of ``stages`` toy stages: over memory links by default, over real ones on any free ports.

    Args:
        scheme: of all endpoints; the stages then choose their own transports, or share ``transport``.
        make_engine: another engine than the toy, for a model of ``layers``.
    """
    if transport is None and scheme is None:
        transport = MemoryTransport()
    ranges = ranges_of(stages, layers)
    endpoints = [f"127.0.0.1:{20_000 + index}" for index in range(stages)]
    sockets: list[socket.socket] = []
    if scheme is not None or isinstance(transport, TcpTransport):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(stages)]
        endpoints = [f"{scheme or 'tcp'}://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    topology = toy_topology(ranges, endpoints)
    engines: dict[int, Any] = {}

    def factory(config: StageConfig) -> StageEngine:
        unified = bool(config.kv_unified)
        extra = extra_sequences(config.kv_cache, lane_count=config.lane_count, kv_unified=unified)
        engine: StageEngine = make_engine(
            config.layer_start,
            config.layer_end,
            layers,
            context_length=config.ctx_size,
            max_sequences=config.lane_count + extra,
        )
        engines[config.stage_index] = engine
        return engine

    async with contextlib.AsyncExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        running: list[Stage] = []
        for index in reversed(range(stages)):
            running.insert(
                0,
                await stack.enter_async_context(
                    open_stage(
                        config := toy_config(index, ranges, endpoints, **keys),
                        topology,
                        options or StageOptions(),
                        functools.partial(factory, config),
                        transport=transport,
                        listen_socket=sockets[index] if sockets else None,
                        inline=inline,
                        telemetry=telemetry,
                        identity=_identity_of(config, layers),
                        ending_secs=lambda: ending_secs,
                    )
                ),
            )
        yield Cluster(running, [engines[i] for i in range(stages)], running[0].context.transport)

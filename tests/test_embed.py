"""The library surface: a chain and its endpoint inside a host's own Trio program."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import httpx
import pytest
import trio
import trio.testing
from gguf import GGUFValueType

from skippy import embed
from skippy.config import ConfigError, OpenAIOptions, StageConfig
from skippy.engine import StageEngine
from skippy.engine.toy import ToyEngine
from skippy.models import GGUFError
from tests.support.cluster import LAYERS, ranges_of, toy_config, toy_topology
from tests.support.tiny_models import write_tiny

ENDPOINTS = [f"127.0.0.1:{port}" for port in (1, 2, 3)]


def toy_engine(config: StageConfig) -> StageEngine:
    return ToyEngine(config.layer_start, config.layer_end, LAYERS, context_length=config.ctx_size)


def whole(model: Path, *, mtp: bool) -> StageConfig:
    config = toy_config(0, [(0, LAYERS)], ENDPOINTS)
    return attrs.evolve(config, model_path=str(model), native_mtp_enabled=mtp)


@contextlib.asynccontextmanager
async def chain(**keys: object) -> AsyncIterator[list[embed.Stage]]:
    """Three toy stages in this process, last one first."""
    ranges, transport = ranges_of(3), embed.MemoryTransport()
    topology = toy_topology(ranges, ENDPOINTS)
    async with contextlib.AsyncExitStack() as stack:
        stages = []
        for index in (2, 1, 0):
            config = toy_config(index, ranges, ENDPOINTS, **keys)
            block = embed.open_stage(config, topology, engine_factory=toy_engine, transport=transport)
            stages.append(await stack.enter_async_context(block))
        yield stages[::-1]


def any_port() -> OpenAIOptions:
    return OpenAIOptions(bind_addr="127.0.0.1:0", model_id="toy")


def test_what_is_imported_when_it_is_asked_for_is_listed_too() -> None:
    assert set(embed.__all__) <= set(dir(embed))


async def test_a_host_serves_a_chain_and_everything_ends_with_the_block() -> None:
    request = {"model": "toy", "prompt": "hello", "max_tokens": 6, "temperature": 0}
    with trio.fail_after(30):
        async with chain() as stages, embed.open_openai(stages[0], any_port()) as endpoint:
            await endpoint.wait_ready()
            assert endpoint.ready
            assert endpoint.last_error is None
            async with httpx.AsyncClient(timeout=60) as http:
                answer = await http.post(endpoint.url + "/completions", json=request)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 6
            port = endpoint.port
        with socket.create_server(("127.0.0.1", port)):
            pass


async def test_readyz_says_why_the_chain_is_not_ready() -> None:
    transport = embed.MemoryTransport()
    config, topology = toy_config(0, ranges_of(2), ENDPOINTS[:2]), toy_topology(ranges_of(2), ENDPOINTS[:2])
    with trio.fail_after(30):
        async with (
            embed.open_stage(config, topology, engine_factory=toy_engine, transport=transport) as stage,
            embed.open_openai(stage, any_port()) as endpoint,
            httpx.AsyncClient(timeout=60) as http,
        ):
            while endpoint.last_error is None:
                await trio.testing.wait_all_tasks_blocked()
            answer = await http.get(endpoint.url.removesuffix("/v1") + "/readyz")
            assert answer.status_code == 503
            text = answer.json()["error"]["message"]
            assert text.startswith("the chain is not ready: stage at 127.0.0.1:2 did not become ready: noth")


@pytest.mark.parametrize(("host", "open_to_all"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_an_endpoint_open_to_a_network_says_so(
    caplog: pytest.LogCaptureFixture, host: str, open_to_all: bool
) -> None:
    with trio.fail_after(30):
        async with (
            chain() as stages,
            embed.open_openai(stages[0], OpenAIOptions(bind_addr=f"{host}:0")) as endpoint,
        ):
            await endpoint.wait_ready()
    logs = [record.msg for record in caplog.records if "asks for no API key" in str(record.msg)]
    assert [log["endpoint"] for log in logs if isinstance(log, dict)] == (
        [f"0.0.0.0:{endpoint.port}"] if open_to_all else []
    )


async def test_an_endpoint_with_keys_asks_for_one(caplog: pytest.LogCaptureFixture) -> None:
    options = OpenAIOptions(bind_addr="0.0.0.0:0", model_id="toy", api_keys=["sk-1"])
    with trio.fail_after(30):
        async with (
            chain() as stages,
            embed.open_openai(stages[0], options) as endpoint,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}", timeout=60) as http,
        ):
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/slots", headers={"authorization": "Bearer sk-1"})).status_code == 200
    assert not [record for record in caplog.records if "asks for no API key" in str(record.msg)]


async def test_leaving_ends_open_streams_with_an_error_frame() -> None:
    request = {"model": "toy", "prompt": "hello", "max_tokens": 400, "temperature": 0, "stream": True}
    lines: list[str] = []
    with trio.fail_after(30):
        # The endpoint's block is left first; the nursery then waits for the reader.
        async with (
            chain() as stages,
            httpx.AsyncClient(timeout=60) as http,
            trio.open_nursery() as nursery,
            embed.open_openai(stages[0], any_port()) as endpoint,
        ):
            started = trio.Event()

            async def read() -> None:
                url = endpoint.url + "/completions"
                async with http.stream("POST", url, json=request) as response:
                    async for line in response.aiter_lines():
                        started.set()
                        lines.append(line)

            nursery.start_soon(read)
            await started.wait()
    lines = [line for line in lines if line]
    assert lines[-1] == "data: [DONE]"
    assert "shutting down" in lines[-2] or '"finish_reason":"length"' in lines[-2].replace(" ", "")


async def test_the_hosts_own_exception_comes_back_as_it_was() -> None:
    with trio.fail_after(30), pytest.raises(ZeroDivisionError):
        async with chain() as stages, embed.open_openai(stages[0], any_port()):
            raise ZeroDivisionError


async def test_cancelling_the_host_leaves_at_once() -> None:
    with trio.fail_after(30):
        with trio.move_on_after(0.5) as scope:
            async with chain() as stages, embed.open_openai(stages[0], any_port()):
                await trio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_cancelled_stage_serves_until_its_block_is_left() -> None:
    request = {"model": "toy", "prompt": "hello", "max_tokens": 6, "temperature": 0}
    ranges, transport = ranges_of(2), embed.MemoryTransport()
    topology = toy_topology(ranges, ENDPOINTS[:2])

    def stage(index: int) -> contextlib.AbstractAsyncContextManager[embed.Stage]:
        config = toy_config(index, ranges, ENDPOINTS[:2])
        return embed.open_stage(config, topology, engine_factory=toy_engine, transport=transport)

    with trio.fail_after(30):
        async with stage(1):
            with trio.CancelScope() as scope:
                async with stage(0) as first:
                    scope.cancel()
                    try:
                        await trio.sleep_forever()
                    finally:
                        # Its prediction returns come in through the listener of the cancelled stage.
                        with trio.CancelScope(shield=True):
                            async with embed.open_openai(first, any_port()) as endpoint:
                                await endpoint.wait_ready()
                                async with httpx.AsyncClient(timeout=60) as http:
                                    answer = await http.post(endpoint.url + "/completions", json=request)
            assert scope.cancelled_caught
            assert answer.status_code == 200, answer.text


async def test_cancelling_while_the_model_loads_ends_the_load(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", layers=LAYERS)
    config = whole(model, mtp=False)
    token = trio.lowlevel.current_trio_token()
    parts: list[int] = []

    def progress(what: str, done: int, _total: int) -> None:
        assert what == "load"
        parts.append(done)
        trio.from_thread.run_sync(scope.cancel, trio_token=token)
        trio.from_thread.run(trio.testing.wait_all_tasks_blocked, trio_token=token)

    with trio.fail_after(30), trio.CancelScope() as scope:
        async with embed.open_stage(config, transport=embed.MemoryTransport(), progress=progress):
            raise AssertionError("it was cancelled before it was loaded")
    assert len(parts) == 1


async def test_only_stage_zero_serves_openai_and_not_with_more_requests_than_lanes() -> None:
    with trio.fail_after(30):
        async with chain(lane_count=2) as stages:
            with pytest.raises(embed.StageStartError, match="only stage 0"):
                async with embed.open_openai(stages[1], any_port()):
                    pass
            with pytest.raises(embed.StageStartError, match="generation concurrency 3 .* lane_count 2"):
                async with embed.open_openai(
                    stages[0], OpenAIOptions(bind_addr="127.0.0.1:0", generation_concurrency=3)
                ):
                    pass


async def test_a_taken_http_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, trio.fail_after(30):
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        async with chain() as stages:
            with pytest.raises(OSError, match=bind):
                async with embed.open_openai(stages[0], OpenAIOptions(bind_addr=bind)):
                    pass


async def test_wrong_models_and_contradictions_are_the_documented_errors(tmp_path: Path) -> None:
    ranges = ranges_of(3)
    config = toy_config(0, ranges, ENDPOINTS)
    with pytest.raises(GGUFError, match="none.gguf"):
        async with embed.open_stage(config):
            pass
    with pytest.raises(ConfigError, match="layer"):
        async with embed.open_stage(config, toy_topology([(0, 1), (1, 4), (4, 6)], ENDPOINTS)):
            pass


async def test_mtp_on_a_model_without_such_layers_is_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny(tmp_path / "m.gguf", layers=LAYERS)
    for mtp, notices in ((False, 0), (True, 1)):
        caplog.clear()
        with trio.fail_after(30):
            async with embed.open_stage(whole(model, mtp=mtp), transport=embed.MemoryTransport()):
                pass
        found = [log for log in caplog.records if "native_mtp_enabled has no effect" in str(log.msg)]
        assert [log.levelname for log in found] == ["WARNING"] * notices


async def test_mtp_on_a_model_with_such_layers_is_refused(tmp_path: Path) -> None:
    extra = {"llama.nextn_predict_layers": (GGUFValueType.UINT32, 1)}
    model = write_tiny(tmp_path / "m.gguf", layers=LAYERS, extra=extra)
    with trio.fail_after(30), pytest.raises(ConfigError, match="^native_mtp_enabled: .* not available yet"):
        async with embed.open_stage(whole(model, mtp=True), transport=embed.MemoryTransport()):
            pass

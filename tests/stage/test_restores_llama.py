"""Restored prefixes on llama.cpp: whatever its cache is made of, greedy answers are those of the whole model.

Cold, warm, from an exported state, from disk after a restart, and behind a part of another prompt. Another
model, quantisation, cut, context or cache sees nothing of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from skippy import embed
from skippy.config import KvCacheConfig, StageConfig
from skippy.embed.stages import engine_options
from skippy.engine.llama import LlamaEngine
from skippy.models import ensure_slice
from skippy.protocol import SamplingConfig
from skippy.stage.links import MemoryTransport
from tests.support.cached import cache_of, complete, counters
from tests.support.cluster import LAYERS, Cluster, ranges_of, toy_config, toy_topology
from tests.support.driver import driver_of
from tests.support.tiny_models import write_tiny
from tests.support.whole_model import WholeModel

CHUNK, COUNT = 7, 8
PROMPT = [1, *((i * 37 + 11) % 250 for i in range(50))]
OTHERS = [[n, *((i * 29 + 7 * n) % 250 for i in range(50))] for n in (2, 3, 4)]
SHARED = 3 * CHUNK
BRANCH = [*PROMPT[:SHARED], *OTHERS[0][SHARED : SHARED + 10]]
LAST = len(PROMPT) - 1
GREEDY = SamplingConfig(flags=3, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def slices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_CACHE", str(folder / "slices"))


def model_of(folder: Path, seed: int = 0, weights: str = "Q8_0") -> Path:
    """A model whose heads are wide enough for quantised caches."""
    path = folder / f"{seed}-{weights}.gguf"
    if not path.exists():
        write_tiny(path, layers=LAYERS, heads=2, kv_heads=2, seed=seed, weights=weights)
    return path


def stage_configs(model: Path, stages: int, **keys: Any) -> list[StageConfig]:
    ranges, endpoints = ranges_of(stages), [f"127.0.0.1:{20_000 + i}" for i in range(stages)]
    keys = {"ctx_size": 128, "lane_count": 2, "n_threads": 1, **keys}
    return [
        attrs.evolve(toy_config(index, ranges, endpoints, **keys), model_path=str(model))
        for index in range(stages)
    ]


@contextlib.asynccontextmanager
async def opened(model: Path, stages: int, directory: Path, **keys: Any) -> AsyncIterator[Cluster]:
    """A chain that keeps states in ``directory``; leaving the block writes all of them."""
    kv = KvCacheConfig(mode="lookup-record", min_tokens=4, directory=str(directory))
    configs = stage_configs(model, stages, kv_cache=kv, **keys)
    topology = toy_topology(ranges_of(stages), [config.bind_addr for config in configs])
    transport, running = MemoryTransport(), []
    async with contextlib.AsyncExitStack() as stack:
        for config in reversed(configs):
            stage = embed.open_stage(config, topology, transport=transport, ending_secs=lambda: 20.0)
            running.insert(0, await stack.enter_async_context(stage))
        yield Cluster(running, [], transport)


def right_answers(model: Path, **keys: Any) -> list[list[int]]:
    """What the whole model gives behind PROMPT, BRANCH and OTHERS."""
    (config,) = stage_configs(model, 1, **keys)
    options = attrs.evolve(engine_options(config), max_sequences=1, cells=None)
    whole = WholeModel(LlamaEngine.load(ensure_slice(model, 0, LAYERS), options), GREEDY, CHUNK)
    try:
        return [whole.answer(prompt, COUNT) for prompt in (PROMPT, BRANCH, *OTHERS)]
    finally:
        whole.close()


@pytest.mark.parametrize(
    ("key", "value", "flash", "unified"),
    [
        ("f16", "f16", "disabled", False),
        ("f16", "f16", "auto", True),
        ("f32", "f32", "disabled", True),
        ("bf16", "f32", "enabled", False),
        ("q8_0", "q8_0", "auto", False),
        ("q4_0", "f16", "disabled", True),
        ("f32", "q4_0", "enabled", False),
    ],
)
async def test_every_kind_of_cache(
    key: str, value: str, flash: str, unified: bool, folder: Path, tmp_path: Path
) -> None:
    keys = {"cache_type_k": key, "cache_type_v": value, "flash_attn_type": flash, "kv_unified": unified}
    model = model_of(folder)
    right, right_branch, *others = right_answers(model, **keys)
    with trio.fail_after(60):
        async with (
            opened(model, 3, tmp_path, **keys) as cluster,
            driver_of(cluster) as driver,
            driver_of(cluster) as another,
        ):

            async def ask(prompt: list[int], expected: list[int], restored: int) -> None:
                answer = await complete(driver, prompt, COUNT, sampling=GREEDY, chunk=CHUNK)
                assert (answer.restored, answer.tokens) == (restored, expected)

            await ask(PROMPT, right, 0)
            await ask(PROMPT, right, LAST)
            await ask(BRANCH, right_branch, SHARED)
            for prompt, expected in zip(OTHERS, others, strict=True):
                await ask(prompt, expected, 0)
            driver = another
            await ask(PROMPT, right, LAST)
            assert [each.errors for each in counters(cluster)] == [0] * 3
        async with opened(model, 3, tmp_path, **keys) as cluster, driver_of(cluster) as driver:
            await ask(PROMPT, right, LAST)
            await ask(BRANCH, right_branch, len(BRANCH) - 1)
            assert [each.imports for each in counters(cluster)] == [2] * 3


async def test_what_is_on_disk_is_nobody_elses(folder: Path, tmp_path: Path) -> None:
    """One directory for all: each has a folder of its own, and finds what it left there itself."""
    model = model_of(folder)
    runs: list[tuple[Path, int, dict[str, Any]]] = [
        (model, 2, {}),
        (model_of(folder, seed=1), 2, {}),
        (model_of(folder, weights="Q4_0"), 2, {}),
        (model, 3, {}),
        (model, 1, {}),
        (model, 2, {"ctx_size": 256}),
        (model, 2, {"kv_unified": True}),
        (model, 2, {"cache_type_k": "q8_0"}),
        (model, 2, {"cache_type_v": "f32"}),
        (model, 2, {"flash_attn_type": "enabled"}),
    ]
    answers, paths = [], set()
    with trio.fail_after(60):
        for again in (False, True):
            for number, (path, stages, keys) in enumerate(runs):
                async with opened(path, stages, tmp_path, **keys) as cluster, driver_of(cluster) as driver:
                    answer = await complete(driver, PROMPT, COUNT, sampling=GREEDY, chunk=CHUNK)
                    assert answer.restored == (LAST if again else 0), number
                    for index in range(stages):
                        states = cache_of(cluster, index).states
                        assert states is not None
                        assert states.durable is not None
                        assert (states.durable.path in paths) is again
                        assert states.durable.stats().corrupt == states.durable.stats().unreadable == 0
                    paths |= {tmp_path / name for name in os.listdir(tmp_path)}
                answers.append(answer.tokens)
    assert answers[: len(runs)] == answers[len(runs) :]
    assert len(paths) == sum(stages for _, stages, _ in runs)
    assert answers[0] == right_answers(model)[0] == answers[3] == answers[4]
    assert answers[1] != answers[0]

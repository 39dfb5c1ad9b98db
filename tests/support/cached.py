"""Chains whose stages remember prompts, and requests on them as a driver sends them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs

from skippy.config import KvCacheConfig
from skippy.kv.entries import KvCounters
from skippy.protocol import MessageKind, Reply, ReplyKind, ReplyStats, SamplingConfig, is_hit
from skippy.stage import GenerationSettings
from skippy.stage.keeping import StageCache
from tests.support.cluster import Cluster, toy_cluster
from tests.support.driver import Driver

K = MessageKind
MISS = Reply.ack(ReplyStats(kv_lookup_misses=1))


@contextlib.asynccontextmanager
async def cached_cluster(
    stages: int, *, kv: dict[str, Any] | None = None, **keys: Any
) -> AsyncIterator[Cluster]:
    """A chain of toy stages with a prefix cache each; prompts of 4 tokens are worth remembering."""
    settings = KvCacheConfig(**{"mode": "lookup-record", "min_tokens": 4, **(kv or {})})
    async with toy_cluster(stages, kv_cache=settings, **keys) as cluster:
        yield cluster


def cache_of(cluster: Cluster, index: int) -> StageCache:
    """The prefix cache of a stage."""
    cache = cluster.stages[index].context.cache
    assert cache is not None
    return cache


def counters(cluster: Cluster) -> list[KvCounters]:
    """What each stage has counted."""
    return [cache_of(cluster, index).index.counters for index in range(len(cluster.stages))]


def hit(stages: int, length: int) -> Reply:
    """The answer where every stage restores ``length`` tokens."""
    stats = ReplyStats(
        kv_lookup_hits=stages,
        kv_imported_pages=stages,
        kv_imported_tokens=stages * length,
        kv_hit_stage_mask=(1 << stages) - 1,
    )
    return Reply(ReplyKind.ACK, length, stats=stats)


@attrs.define
class Answer:
    """What one request gave.

    Attributes:
        restored: how many tokens of the prompt were restored.
        tokens: what was generated.
    """

    restored: int
    tokens: list[int]


async def configure(
    driver: Driver,
    namespace: str = "",
    sampling: SamplingConfig | None = None,
    checkpoints: tuple[int, ...] = (),
    chunks: tuple[int, ...] = (),
) -> None:
    """Send a request's settings."""
    settings = GenerationSettings(
        cache_namespace=namespace, cache_checkpoints=checkpoints, cache_chunks=chunks
    )
    metadata = settings.to_metadata()
    await driver.ask(K.CONFIGURE_GENERATION, sampling=sampling, chat_sampling_metadata=metadata)


async def complete(
    driver: Driver,
    prompt: Sequence[int],
    count: int,
    *,
    namespace: str = "",
    sampling: SamplingConfig | None = None,
    chunk: int = 7,
    restore: bool = True,
    checkpoints: tuple[int, ...] = (),
    chunks: tuple[int, ...] = (),
) -> Answer:
    """One whole request on a lane: settings, what can be restored, the rest of the prompt, tokens, Stop."""
    last, start = len(prompt) - 1, 0
    driver.prompt_tokens = len(prompt)
    driver.request_id += 2
    await configure(driver, namespace, sampling, checkpoints, chunks)
    if restore:
        reply = await driver.ask(K.TRY_RESTORE_PREFILL, 0, prompt[:-1], current_token=prompt[-2])
        start = reply.predicted if is_hit(reply.stats) else 0
    for position in range(start, last, chunk):
        rows = prompt[position : min(position + chunk, last)]
        await driver.ask(K.PREFILL_EMBD, position, rows, prompt_token_count=last)
    tokens: list[int] = []
    for step in range(count):
        tokens.append(await driver.decode(last + step, tokens[-1] if tokens else prompt[-1]))
    assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
    return Answer(start, tokens)

"""Random requests with prefixes in common, on random chains.

Whatever is restored, evicted or lost meanwhile, every answer is the one of the unsplit engine.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import attrs
import trio
from hypothesis import HealthCheck, given, settings, strategies as st

from skippy.protocol import MessageKind, ReplyKind
from skippy.stage import Stage
from tests.stage.test_chain import unsplit_tokens, wait_for_sequences
from tests.support.cached import cache_of, cached_cluster, complete, configure
from tests.support.cluster import Cluster
from tests.support.driver import Driver, dial_driver

K = MessageKind
_TEXTS = (
    b"You are a helpful one. ",
    b"You are a terse one. ",
    b"Say a word",
    b"Say no more, say",
    b", now.",
    b"x",
)
_unsplit = functools.cache(lambda prompt, count: unsplit_tokens(list(prompt), count))


@attrs.frozen
class Request:
    """One request of a workload.

    Attributes:
        texts: which texts the prompt consists of.
        again: the prompt goes on with what the lane's last request has generated.
        leaves: the client is gone after so many of its messages; None: it stays to the end.
        evicts: what some stage forgets beforehand: "one" entry, or "all" of them; "every": all stages do.
    """

    texts: tuple[int, ...]
    again: bool
    count: int
    chunk: int
    namespace: str
    way: str
    leaves: int | None
    evicts: str | None


requests = st.builds(
    Request,
    texts=st.lists(st.integers(0, len(_TEXTS) - 1), min_size=1, max_size=4).map(tuple),
    again=st.booleans(),
    count=st.integers(1, 5),
    chunk=st.integers(3, 20),
    namespace=st.sampled_from(["", "ab"]),
    way=st.sampled_from(["restore", "restore", "restore", "fused", "cold"]),
    leaves=st.none() | st.integers(1, 5),
    evicts=st.none() | st.sampled_from(["one", "all", "every"]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    stages=st.integers(1, 3),
    lanes=st.lists(st.lists(requests, min_size=1, max_size=5), min_size=1, max_size=8),
    kv=st.fixed_dictionaries(
        {
            "max_entries": st.integers(1, 8),
            "extra_sequences": st.integers(0, 3),
            "min_tokens": st.integers(1, 12),
            "max_bytes": st.sampled_from([0, 1, 2000, 20_000]),
            "activation_max_bytes": st.sampled_from([0, 500, 2**20]),
        }
    ),
    spare=st.integers(0, 2),
    inline=st.booleans(),
    unified=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_no_answer_depends_on_what_is_remembered(
    stages: int,
    lanes: list[list[Request]],
    kv: dict[str, Any],
    spare: int,
    inline: bool,
    unified: bool,
    seed: int,
) -> None:
    async def run() -> None:
        with trio.fail_after(60):
            async with cached_cluster(
                stages,
                kv=kv,
                lane_count=len(lanes) + spare,
                inline=inline,
                ctx_size=256,
                kv_unified=unified,
            ) as cluster:
                async with trio.open_nursery() as nursery:
                    for number, workload in enumerate(lanes):
                        nursery.start_soon(
                            _lane, cluster, workload, number, random.Random(f"{seed}/{number}")
                        )
                await wait_for_sequences(cluster)
                for stage in cluster.stages:
                    await _check(stage)

    trio.run(run)


async def _lane(cluster: Cluster, workload: list[Request], number: int, rng: random.Random) -> None:
    """Run the requests of one lane; a lane that its client leaves is followed by another one."""
    left, last = list(workload), ()
    while left:
        async with dial_driver(cluster.first) as driver:
            driver.request_id = 1000 * (number + 1) + 10 * len(left)
            while left:
                request = left.pop(0)
                _forget(cluster, request, rng)
                prompt = [256, *b"".join(_TEXTS[index] for index in request.texts)]
                if request.again and last:
                    prompt = [*last, *prompt[1:]][-200:]
                if request.leaves is not None:
                    await _leave(driver, request, prompt)
                    break
                tokens = await _complete(driver, request, prompt)
                assert tokens == _unsplit(tuple(prompt), request.count), request
                last = (*prompt, *tokens)


async def _complete(driver: Driver, request: Request, prompt: list[int]) -> list[int]:
    if request.way == "fused" and len(prompt) > 2:
        driver.request_id += 2
        driver.prompt_tokens = len(prompt)
        await configure(driver, request.namespace)
        reply = await driver.ask(
            K.TRY_RESTORE_PREFILL_DECODE,
            len(prompt) - 1,
            prompt,
            token_count=1,
            current_token=prompt[-1],
            decode_step=0,
        )
        tokens = []
        if reply.kind is ReplyKind.PREDICTED_TOKEN:
            tokens = [reply.predicted]
            while len(tokens) < request.count:
                tokens.append(await driver.decode(len(prompt) - 1 + len(tokens), tokens[-1]))
        await driver.ask(K.STOP)
        if tokens:
            return tokens
    answer = await complete(
        driver,
        prompt,
        request.count,
        namespace=request.namespace,
        chunk=request.chunk,
        restore=request.way == "restore" and len(prompt) > 1,
    )
    return answer.tokens


async def _leave(driver: Driver, request: Request, prompt: list[int]) -> None:
    """Begin the request and go away in the middle of it, without waiting for the last answer."""
    driver.request_id += 2
    driver.prompt_tokens = len(prompt)
    await configure(driver, request.namespace)
    start = 0
    if request.way != "cold" and len(prompt) > 1:
        await driver.send(K.TRY_RESTORE_PREFILL, 0, prompt[:-1], current_token=prompt[-2])
        if request.leaves == 1:
            return
        start = (await driver.reply()).predicted
    for left, position in enumerate(range(start, len(prompt) - 1, request.chunk)):
        chunk = prompt[position : min(position + request.chunk, len(prompt) - 1)]
        await driver.send(K.PREFILL_EMBD, position, chunk)
        if left + 2 == request.leaves:
            return
        await driver.reply()
    await driver.send(K.DECODE_EMBD, len(prompt) - 1, [prompt[-1]], decode_step=0)


def _forget(cluster: Cluster, request: Request, rng: random.Random) -> None:
    if request.evicts is None:
        return
    if request.evicts == "every":
        for index in range(len(cluster.stages)):
            cache_of(cluster, index).forget_all("all")
        return
    cache = cache_of(cluster, rng.randrange(len(cluster.stages)))
    entries = cache.index.entries()
    if request.evicts == "one":
        entries = rng.sample(entries, min(1, len(entries)))
    for entry in entries:
        cache.forget(entry)


async def _check(stage: Stage) -> None:
    """What is kept is in the engine, and nothing else."""
    cache, sequences = stage.context.cache, range(stage.info.max_sequences)
    assert cache is not None
    assert cache.states is not None
    await cache.states.writer.wait_idle()
    lengths = await stage.context.scheduler.run(lambda engine: [engine.length(each) for each in sequences])
    entries = cache.index.entries()
    assert not any(entry.live or entry.refs for entry in entries)
    assert len(entries) <= cache.settings.max_entries
    resident = [entry for entry in entries if entry.sequence is not None]
    held = {entry.sequence: entry.length for entry in resident}
    assert len(held) == len(resident)
    blocks = cache.states.blocks
    assert blocks.stats().states == sum(entry.state is not None for entry in entries)
    assert blocks.used_bytes <= blocks.max_bytes
    for sequence, length in zip(sequences, lengths, strict=True):
        assert length >= held[sequence] if sequence in held else length == 0

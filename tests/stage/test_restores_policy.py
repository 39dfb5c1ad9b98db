"""Over a working set of ten times its cache a stage restores what the documented policy says, each time."""

from __future__ import annotations

import random
from collections.abc import Generator

import trio

from tests.kv.test_policy import MIN_TOKENS, SEQUENCES, Documented, Request
from tests.support.cached import cache_of, cached_cluster, complete
from tests.support.driver import driver_of

REQUESTS = 500
Chat = tuple[str, list[int], int]
"""Namespace, prompt, and how many tokens are generated."""


def chats(seed: int, popular: int) -> Generator[Chat, list[int], None]:
    """As ``conversations`` of tests.kv.test_policy, but answers are what is sent in."""
    chance = random.Random(seed)

    def text(low: int, high: int) -> list[int]:
        return [chance.randrange(1, 250) for _ in range(chance.randint(low, high))]

    systems = [text(20, 200) for _ in range(12)]
    held: list[list[int]] = [[] for _ in range(popular)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(popular)]
    while True:
        number = chance.choices(range(popular), weights)[0]
        if not held[number] or len(held[number]) > 400:
            held[number] = systems[number % len(systems)] + text(5, 40)
        prompt = held[number] + text(5, 60)
        answer = yield f"{number % 3:02x}", prompt, chance.randint(1, 4)
        held[number] = prompt + answer


def letters(tokens: list[int]) -> str:
    return "".join(chr(0x4E00 + token) for token in tokens)


async def test_what_is_restored_is_what_the_policy_says() -> None:
    """One client at a time, so that it says just one thing. The last token of a reply is never computed."""
    kv = {"min_tokens": MIN_TOKENS, "extra_sequences": SEQUENCES - 1, "max_bytes": 1}
    model, source = Documented(0), chats(1, 10 * SEQUENCES)
    found, expected = [], []
    with trio.fail_after(120):
        async with (
            cached_cluster(1, kv=kv, lane_count=1, inline=True, ctx_size=1024) as cluster,
            driver_of(cluster) as driver,
        ):
            namespace, prompt, count = next(source)
            for _ in range(REQUESTS):
                answer = await complete(driver, prompt, count, namespace=namespace, chunk=300)
                found.append(answer.restored)
                expected.append(model.run(Request(namespace, letters(prompt), letters(answer.tokens[:-1]))))
                namespace, prompt, count = source.send(answer.tokens)
            stats = cache_of(cluster, 0).index.stats()
    assert found == expected
    assert stats.counters.evicted_resident > REQUESTS // 4
    assert stats.counters.hits == sum(length > 0 for length in found) > REQUESTS // 2

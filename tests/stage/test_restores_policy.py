"""Over a working set of ten times its cache a stage restores what the documented policy says, each time."""

from __future__ import annotations

import random

import trio

from tests.kv.test_policy import MIN_TOKENS, SEQUENCES, Documented, Request, chats
from tests.support.cached import cache_of, cached_cluster, complete
from tests.support.driver import driver_of

REQUESTS = 500


def letters(tokens: list[int]) -> str:
    return "".join(chr(0x4E00 + token) for token in tokens)


async def test_what_is_restored_is_what_the_policy_says() -> None:
    """One client at a time, so that it says just one thing. The last token of a reply is never computed."""
    kv = {"min_tokens": MIN_TOKENS, "extra_sequences": SEQUENCES - 1, "max_bytes": 1}
    chance, model = random.Random(1), Documented(0)

    def text(low: int, high: int) -> list[int]:
        return [chance.randrange(1, 250) for _ in range(chance.randint(low, high))]

    source = chats(chance, 10 * SEQUENCES, text, longest=400)
    found, expected = [], []
    with trio.fail_after(120):
        async with (
            cached_cluster(1, kv=kv, lane_count=1, inline=True, ctx_size=1024) as cluster,
            driver_of(cluster) as driver,
        ):
            number, prompt = next(source)
            for _ in range(REQUESTS):
                namespace, count = f"{number % 3:02x}", chance.randint(1, 4)
                answer = await complete(driver, prompt, count, namespace=namespace, chunk=300)
                found.append(answer.restored)
                expected.append(model.run(Request(namespace, letters(prompt), letters(answer.tokens[:-1]))))
                number, prompt = source.send(answer.tokens)
            stats = cache_of(cluster, 0).index.stats()
    assert found == expected
    assert stats.counters.evicted_resident > REQUESTS // 4
    assert stats.counters.hits == sum(length > 0 for length in found) > REQUESTS // 2

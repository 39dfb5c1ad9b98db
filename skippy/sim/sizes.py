"""How large the storm of a seed is: what each of its numbers is drawn from. Pure.

Most are small: a large one takes as long as two of them, and in the same time small ones show more of the
faults that are planted. A tenth is large, for what needs many requests at once, long prompts or four stages.
"""

from __future__ import annotations

import random
from typing import Final

import attrs


@attrs.frozen(slots=True, kw_only=True)
class Size:
    """What each number of a scenario is drawn from.

    Attributes:
        stages: of the chain.
        lanes: requests at once.
        requests_for_each_lane: the most of them, and one more.
        returning: the most requests of those who find a cache.
        prompt: tokens of a prompt that has no beginning in common with others.
        text: tokens of a beginning that prompts have in common.
        answer: the most tokens of an answer.
        frames: actions of a peer for each of its requests, the least and the most.
        secs: requests come, and faults begin, within this time; requests of those who find a cache within
            twice that time.
    """

    name: str
    stages: tuple[int, ...]
    lanes: tuple[int, ...]
    requests_for_each_lane: int
    returning: int
    prompt: tuple[int, ...]
    text: tuple[int, ...]
    answer: tuple[int, ...]
    frames: tuple[int, int]
    secs: float


LARGE: Final = Size(
    name="large",
    stages=(1, 2, 2, 3, 3, 4),
    lanes=(1, 2, 2, 3, 4),
    requests_for_each_lane=2,
    returning=8,
    prompt=(1, 5, 20, 40),
    text=(6, 20, 40),
    answer=(1, 4, 10, 20),
    frames=(5, 30),
    secs=5.0,
)
SMALL: Final = Size(
    name="small",
    stages=(1, 2, 2, 3),
    lanes=(1, 1, 2, 2),
    requests_for_each_lane=1,
    returning=5,
    prompt=(1, 4, 12),
    text=(8, 20),
    answer=(1, 3, 6),
    frames=(3, 9),
    secs=1.5,
)
SIZES: Final = {size.name: size for size in (SMALL, LARGE)}


def draw_size(seed: int) -> Size:
    """Nine of ten seeds are small.

    The dice are of their own, so that a size makes the same of a seed whether it was drawn or asked for.
    """
    return LARGE if random.Random(f"size/{seed}").random() < 0.1 else SMALL

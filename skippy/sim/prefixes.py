"""What stages remember in a simulation, and prompts that begin alike. Pure.

The dice are of their own, so what else a seed stands for does not depend on them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import attrs

from skippy.config import KvCacheConfig
from skippy.frontend.generation import GenerationRequest

from .oracle import ToyModel, expected
from .sizes import Size

MAX_PROMPT: Final = 60
"""Tokens: a prompt must leave room for an answer."""


@attrs.frozen(slots=True)
class Loss:
    """One stage is told to forget what the others may still have, which is no fault.

    Attributes:
        at: when.
        place: which stage, as a part of all there are, 0 to 1.
        everything: all that it remembers; else what was used longest ago of that.
    """

    at: float
    place: float
    everything: bool


@attrs.frozen(slots=True)
class Prefixes:
    """What a seed's stages remember, and what of.

    Attributes:
        cache: of every stage.
        texts: what prompts begin with.
        losses: what some of them forget again.
    """

    cache: KvCacheConfig
    texts: tuple[tuple[int, ...], ...]
    losses: tuple[Loss, ...] = ()


def draw_prefixes(seed: int, size: Size) -> Prefixes | None:
    """Half of all seeds have caches."""
    chance = random.Random(f"prefixes/{seed}")
    if chance.random() < 0.5:
        return None
    cache = KvCacheConfig(
        mode=chance.choice(["lookup-record", "lookup-record", "lookup-record", "record"]),
        payload=chance.choice(["auto", "auto", "kv-recurrent", "full-state"]),
        max_entries=chance.choice([1, 2, 64]),
        max_bytes=chance.choice([0, 1000, 20_000]),
        min_tokens=chance.choice([1, 4, 16]),
        shared_prefix_stride_tokens=chance.choice([4, 128]),
        shared_prefix_record_limit=chance.choice([0, 2]),
        extra_sequences=chance.choice([0, 0, 1, 3]),
        activation_max_bytes=chance.choice([0, 1000, 2**20]),
        audit_rate=chance.choice([0.0, 0.0, 1.0]),
    )
    texts = [_text(chance, chance.choice(size.text)) for _ in range(chance.randint(1, 2))]
    losses = [
        Loss(chance.uniform(0, 2 * size.secs), chance.random(), chance.random() < 0.5)
        for _ in range(chance.choice([0, 4, 12]))
    ]
    return Prefixes(cache, tuple(texts), tuple(losses))


def begin(chance: random.Random, texts: Sequence[tuple[int, ...]], own: Sequence[int]) -> list[int]:
    """A prompt that begins as one of the texts does, and ends with what is its own, at least one token."""
    text = chance.choice(texts)
    return [*text[: chance.choice([len(text), chance.randint(1, len(text))])], *own][:MAX_PROMPT]


def share(
    seed: int, prefixes: Prefixes, model: ToyModel, asked: Sequence[GenerationRequest]
) -> list[list[int]]:
    """Other prompts for requests: most begin as others do, or go on where an answer has ended."""
    chance = random.Random(f"prompts/{seed}")
    prompts: list[list[int]] = []
    for number, request in enumerate(asked):
        prompt, what = list(request.prompt), chance.random()
        if number and what < 0.3:
            before = attrs.evolve(asked[number - 1], prompt=prompts[number - 1])
            answer = expected(model, before)[0]
            prompt = [*before.prompt, *answer, *_text(chance, 3)]
        elif number and what < 0.4:
            prompt = prompts[chance.randrange(number)]
        elif what < 0.9:
            prompt = begin(chance, prefixes.texts, prompt)
        prompts.append(prompt[:MAX_PROMPT])
    return prompts


def _text(chance: random.Random, length: int) -> tuple[int, ...]:
    return tuple(chance.randrange(32, 127) for _ in range(length))

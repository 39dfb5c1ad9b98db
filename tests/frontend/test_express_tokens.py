"""Tokens that go past the iteration that waits for them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
import trio.testing

from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import FinishReason, GenerationRequest
from skippy.protocol import PositionLogProbabilities
from tests.stage.test_chain import PROMPT, generator_over, unsplit_tokens
from tests.stage.test_replay import PORTS, REQUEST, RIGHT, lossy_chain, once
from tests.support.cluster import toy_cluster


class Listener:
    """Reads a generation; takes the tokens for which ``takes`` gives True past the iteration."""

    def __init__(self, generator: ChainGenerator, takes: Callable[[int], bool]) -> None:
        self._generator = generator
        self._takes = takes
        self.tokens: list[int] = []
        self.expressed = 0
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[PositionLogProbabilities | None] = []

    async def listen(self, request: GenerationRequest) -> None:
        async with self._generator.generate(request) as stream:

            def express(token: int) -> bool:
                if not self._takes(len(self.tokens)):
                    return False
                self.tokens.append(token)
                self.expressed += 1
                return True

            stream.express = express
            async for token in stream:
                self.tokens.append(token)
                self.logprobs.append(stream.logprobs)
            assert stream.generated == len(self.tokens)
            self.finish_reason = stream.finish_reason


CHANCE = random.Random(3)
TAKES: list[Callable[[int], bool]] = [
    lambda _: True,
    lambda index: index % 2 == 0,
    lambda index: index != 19,
    lambda index: CHANCE.random() < 0.7,
]


@pytest.mark.parametrize("takes", TAKES)
@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_the_tokens_are_those_of_the_iteration(stages: int, takes: Callable[[int], bool]) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, generator_over(cluster) as generator:
            listener = Listener(generator, takes)
            await listener.listen(GenerationRequest(prompt=PROMPT, max_tokens=40))
    assert listener.tokens == unsplit_tokens(PROMPT, 40)
    assert listener.finish_reason == "length"
    assert listener.expressed > 0


@pytest.mark.parametrize("stages", [1, 3])
async def test_what_a_listener_raises_ends_the_iteration(stages: int) -> None:
    def takes(index: int) -> bool:
        if index == last:
            raise ValueError("no more")
        return True

    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, generator_over(cluster) as generator:
            for last in (0, 5, 19):
                listener = Listener(generator, takes)
                with pytest.raises(ValueError, match="no more"):
                    await listener.listen(GenerationRequest(prompt=PROMPT, max_tokens=20))
                assert listener.tokens == unsplit_tokens(PROMPT, 20)[:last]
            listener = Listener(generator, lambda _: True)
            await listener.listen(GenerationRequest(prompt=PROMPT, max_tokens=20))
            assert listener.tokens == unsplit_tokens(PROMPT, 20)


@pytest.mark.parametrize("where", PORTS)
async def test_a_lost_lane_is_replayed(where: str, autojump_clock: trio.testing.MockClock) -> None:
    for number in range(1, 20, 3):
        async with lossy_chain() as chain:
            chain.transport.fate = once(PORTS[where], number, "lose")
            listener = Listener(chain.generator, lambda _: True)
            await listener.listen(REQUEST)
            assert listener.tokens == RIGHT
        assert chain.replays in (["begin", "end"], []), number

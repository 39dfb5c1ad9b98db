"""Drivers that do anything that is allowed, at random: each reply is what one engine would have given.

The oracle runs every frame that is not stale on an unsplit engine, with a sampler made anew over the tokens
that stand before it, so nothing that a chain remembers wrongly (a row, a token of a sampler's history, an
epoch) goes unseen.
"""

from __future__ import annotations

import random

import attrs
import pytest
import trio

from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.protocol import MessageKind, Reply, ReplyKind, SamplingConfig
from skippy.stage.links import MemoryTransport, TcpTransport
from tests.stage.test_chain import wait_for_sequences
from tests.support.cluster import LAYERS, toy_cluster
from tests.support.driver import Driver, driver_of

K = MessageKind
SEEDED = SamplingConfig(flags=1, seed=5, temperature=0.8, top_k=20, repeat_penalty=1.2, presence_penalty=0.3)
PROMPT = [256, *b"whatever may come"]
FRAMES = 60
IN_FLIGHT = 8
Expected = tuple[ReplyKind, tuple[int, ...]]
ACK: Expected = (ReplyKind.ACK, ())


@attrs.define
class Oracle:
    """What the chain must hold and say."""

    sampling: SamplingConfig | None
    engine: ToyEngine = attrs.field(factory=lambda: ToyEngine(0, LAYERS, LAYERS))
    held: list[int] = attrs.field(factory=list)

    def cut(self, length: int) -> None:
        self.engine.trim(0, length)
        del self.held[length:]

    def run(self, tokens: list[int], step: int | None = None) -> tuple[int, ...]:
        """Append rows; what follows each of them, where ``step`` says which draws those are."""
        rows = len(tokens) if step is not None else 0
        self.engine.decode([Segment(0, len(self.held), len(tokens), tokens=tokens, logits=rows)])
        predicted = []
        for row in range(rows):
            sampler = self.engine.new_sampler(self.sampling)
            sampler.accept([*self.held, *tokens[: row + 1]])
            predicted.append(sampler.sample(self.engine.logits(row), max(0, step or 0) + row))
        self.held += tokens
        return tuple(predicted)


class RandomDriver:
    """Sends frames at random, and reads what is owed for them."""

    def __init__(self, driver: Driver, chance: random.Random, sampling: SamplingConfig | None) -> None:
        self.driver = driver
        self.chance = chance
        self.oracle = Oracle(sampling)
        self.owed: list[Expected] = []
        self.window_id = 0

    def tokens(self, most: int) -> list[int]:
        return [self.chance.randrange(32, 127) for _ in range(self.chance.randint(1, most))]

    def position(self) -> int:
        """Mostly the end, sometimes up to five positions back; never the first one."""
        held = len(self.oracle.held)
        return held if self.chance.random() < 0.6 else max(1, held - self.chance.randint(1, 5))

    async def start(self, sampling: SamplingConfig | None) -> None:
        await self.driver.start(PROMPT, sampling)
        self.oracle.run(PROMPT[:-1])

    async def step(self) -> None:
        actions = [self.decode, self.decode, self.verify, self.verify, self.trim_and_replay, self.late]
        await self.chance.choice(actions)()
        while len(self.owed) > self.chance.randrange(IN_FLIGHT):
            await self.read()

    async def read(self) -> None:
        kind, tokens = self.owed.pop(0)
        reply: Reply = await self.driver.reply()
        assert (reply.kind, reply.predicted_tokens) == (kind, tokens)

    async def decode(self) -> None:
        position, token = self.position(), self.tokens(1)[0]
        self.oracle.cut(position)
        step = self.driver.step(position)
        kind = self.chance.choice([K.DECODE_EMBD, K.DECODE_LIGHT_CTX, K.DECODE_READOUT])
        self.owed.append((ReplyKind.PREDICTED_TOKEN, self.oracle.run([token], step)))
        await self.driver.send(kind, position, [token], decode_step=step)

    async def verify(self) -> None:
        position, tokens = self.position(), self.tokens(5)
        self.oracle.cut(position)
        step = self.driver.step(position)
        self.owed.append((ReplyKind.PREDICTED_TOKENS, self.oracle.run(tokens, step)))
        self.window_id += self.chance.randint(1, 3)
        await self.driver.verify(self.window_id, position, tokens)
        if self.chance.random() < 0.3:
            # Committed once it is answered, and what is committed may be retired: there is no reply to that.
            while self.owed:
                await self.read()
            await self.driver.send(K.RETIRE_VERIFY_WINDOW, position, token_count=len(tokens))

    async def trim_and_replay(self) -> None:
        length = max(1, len(self.oracle.held) - self.chance.randrange(6))
        await self.driver.send(K.TRIM_SESSION, token_count=length)
        self.oracle.cut(length)
        self.driver.generation += 1
        position, tokens = max(1, length - self.chance.randrange(2)), self.tokens(3)
        self.oracle.cut(position)
        self.oracle.run(tokens)
        await self.driver.send(K.DECODE_REPLAY_EMBD, position, tokens)
        self.owed += [ACK, ACK]

    async def late(self) -> None:
        """A frame of a generation before, of any kind that has an epoch."""
        if self.driver.generation == 0:
            return
        current, self.driver.generation = (
            self.driver.generation,
            self.chance.randrange(self.driver.generation),
        )
        kind = self.chance.choice([K.PREFILL_EMBD, K.DECODE_REPLAY_EMBD, K.DECODE_EMBD, K.VERIFY_WINDOW])
        position = self.chance.randrange(200)
        if kind is K.VERIFY_WINDOW:
            await self.driver.verify(self.chance.randrange(50), position, self.tokens(4))
            self.owed.append((ReplyKind.PREDICTED_TOKENS, ()))
        else:
            await self.driver.send(kind, position, self.tokens(1))
            self.owed.append((ReplyKind.PREDICTED_TOKEN, ()) if kind is K.DECODE_EMBD else ACK)
        self.driver.generation = current


@pytest.mark.parametrize("transport", [MemoryTransport, TcpTransport])
@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_whatever_a_driver_does(
    stages: int, transport: type[MemoryTransport] | type[TcpTransport]
) -> None:
    with trio.fail_after(60):
        async with (
            toy_cluster(stages, transport=transport(), lane_count=1) as cluster,
            driver_of(cluster) as driver,
        ):
            for seed in range(10 * stages, 10 * stages + 4):
                sampling = SEEDED if seed % 2 else None
                driver.request_id, driver.generation = 100 + seed, 0
                life = RandomDriver(driver, random.Random(seed), sampling)
                await life.start(sampling)
                for _ in range(FRAMES):
                    await life.step()
                while life.owed:
                    await life.read()
                assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
            await wait_for_sequences(cluster)

"""Safe mode on llama.cpp: an answer is bit by bit that of the whole model which computes nothing else.

The model is one whose numbers move with every other chunk: flash attention takes another way for chunks of 64
rows or more, and a single row goes through other kernels than several do.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import trio

from skippy.config import KvCacheConfig, StageOptions
from skippy.engine import StageEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.protocol import PositionLogProbabilities, SamplingConfig
from tests.stage.test_chain import generator_over
from tests.support.cached import cache_of
from tests.support.cluster import LAYERS, Cluster, toy_cluster
from tests.support.lossy import Fate, Frame, LossyTransport
from tests.support.tiny_models import write_tiny
from tests.support.whole_model import WholeModel, load_layers

CHUNK = 64
GREEDY = SamplingConfig(flags=3, temperature=0.0)
SAMPLED = SamplingConfig(flags=3, seed=23, temperature=1.1, top_k=60, repeat_penalty=1.3)
Scores = list[PositionLogProbabilities | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_tiny(path, layers=LAYERS, width=128, heads=2, kv_heads=1)


def load(model: Path, start: int, end: int, _: int = LAYERS, **options: Any) -> StageEngine:
    return load_layers(model, start, end, **options)


class Client:
    """Asks what begins as others' prompts do, or goes on where its own last answer ended."""

    def __init__(self, seed: str, generator: ChainGenerator, cluster: Cluster) -> None:
        self.chance = random.Random(seed)
        self.generator = generator
        self.cluster = cluster
        self.prompt: list[int] = []
        self.answers: list[tuple[GenerationRequest, list[int], Scores]] = []
        self.cached = 0

    async def run(self, requests: int) -> None:
        for _ in range(requests):
            request = GenerationRequest(
                prompt=self.next_prompt(),
                max_tokens=self.chance.choice([1, 5, 20]),
                sampling=self.chance.choice([GREEDY, GREEDY, SAMPLED]),
                top_logprobs=self.chance.choice([None, 0]),
            )
            self.forget()
            if self.chance.random() < 0.1:  # a client that leaves, wherever that is
                with trio.move_on_after(self.chance.random() / 50):
                    await self.ask(request)
                continue
            tokens, scores = await self.ask(request)
            self.answers.append((request, tokens, scores))
            self.prompt = [*request.prompt, *tokens]

    def next_prompt(self) -> list[int]:
        text = random.Random(self.chance.randrange(3)).choices(range(1, 250), k=300)  # one of three
        if self.prompt and self.chance.random() < 0.4:
            return [*self.prompt, *text[: self.chance.randrange(1, 40)]][-440:]
        return text[: self.chance.choice([63, 64, 65, 66, 129, 130, 200, 280])] + [
            self.chance.randrange(1, 250) for _ in range(self.chance.choice([0, 0, 1, 30]))
        ]

    def forget(self) -> None:
        cache = cache_of(self.cluster, self.chance.randrange(len(self.cluster.stages)))
        entries = cache.index.entries()
        if entries and self.chance.random() < 0.2:
            cache.forget(self.chance.choice(entries))

    async def ask(self, request: GenerationRequest) -> tuple[list[int], Scores]:
        tokens, scores = [], []
        async with self.generator.generate(request) as stream:
            async for token in stream:
                tokens.append(token)
                scores.append(stream.logprobs)
        self.cached += stream.timings.cached_tokens
        return tokens, scores


@pytest.mark.parametrize(("stages", "seed"), [(1, 0), (2, 1), (3, 2), (3, 3)])
async def test_an_answer_depends_on_its_request_alone(stages: int, seed: int, model: Path) -> None:
    """Whatever is restored, forgotten on one stage, lost, or asked at the same time."""
    chance, transport = random.Random(seed), LossyTransport()

    def fate(frame: Frame) -> Fate:
        return "lose" if chance.random() < 0.004 else None

    transport.fate = fate
    clients: list[Client] = []
    with trio.fail_after(60):
        async with (
            toy_cluster(
                stages,
                make_engine=functools.partial(load, model),
                transport=transport,
                options=StageOptions(safe_mode=True),
                kv_cache=KvCacheConfig(mode="lookup-record", min_tokens=16, extra_sequences=seed % 4),
                lane_count=3,
                ctx_size=512,
            ) as cluster,
            generator_over(cluster, lanes=3, chunk=CHUNK) as generator,
            trio.open_nursery() as nursery,
        ):
            for number in range(3):
                clients.append(client := Client(f"{seed}/{number}", generator, cluster))
                nursery.start_soon(client.run, 12)
    engine = load(model, 0, LAYERS)
    for client in clients:
        assert client.cached > 0
        for request, tokens, scores in client.answers:
            assert request.sampling is not None
            whole = WholeModel(engine, request.sampling, CHUNK)
            assert tokens == whole.answer(request.prompt, request.max_tokens), request
            if request.top_logprobs is not None:
                assert scores == whole.scores, request
    engine.drop(0)
    engine.close()

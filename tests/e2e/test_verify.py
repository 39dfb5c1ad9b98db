"""Verify windows on the bundled model: a chain predicts what the unsplit engine does with the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from skippy.engine import EngineOptions, Sampler, Segment, StageEngine
from skippy.engine.llama import LlamaEngine
from skippy.models import ensure_slice
from skippy.protocol import MessageKind, SamplingConfig
from skippy.stage.links import TcpTransport
from tests.stage.test_chain import wait_for_sequences
from tests.support.cluster import toy_cluster
from tests.support.driver import Driver, driver_of

pytestmark = pytest.mark.model

K = MessageKind
LAYERS = 30
TEXT = "The largest city in France is"
TOKENS = 24
CTX = 256
SEEDED = SamplingConfig(flags=1, seed=7, temperature=0.8, top_k=30, repeat_penalty=1.2, penalty_last_n=32)

Load = Callable[..., LlamaEngine]


@pytest.fixture(scope="module")
def load(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Load:
    cache = tmp_path_factory.mktemp("slices")

    def make(start: int, end: int, _layers: int = LAYERS, **options: Any) -> LlamaEngine:
        options = {"context_length": CTX, "max_sequences": 1, "n_threads": 1, **options}
        return LlamaEngine.load(
            ensure_slice(bundled_model, start, end, cache_dir=cache), EngineOptions(**options)
        )

    return make


@pytest.fixture(scope="module")
def whole(load: Load) -> Iterator[LlamaEngine]:
    engine = load(0, LAYERS)
    yield engine
    engine.close()


@attrs.define
class Unsplit:
    """One engine that holds all layers, and runs windows on its own."""

    engine: StageEngine
    prompt: Sequence[int]
    sampling: SamplingConfig | None
    history: list[int] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.engine.drop(0)
        self._run(self.prompt[:-1], logits=0)

    def _run(self, tokens: Sequence[int], logits: int) -> None:
        self.engine.decode([Segment(0, len(self.history), len(tokens), tokens=tokens, logits=logits)])
        self.history += tokens

    def verify(self, position: int, tokens: Sequence[int]) -> list[int]:
        """The prediction behind each row; what stood at ``position`` and above is undone."""
        self.engine.trim(0, position)
        del self.history[position:]
        sampler: Sampler = self.engine.new_sampler(self.sampling)
        sampler.accept(self.history)
        step = position - (len(self.prompt) - 1)
        self._run(tokens, logits=len(tokens))
        predicted = []
        for row, token in enumerate(tokens):
            sampler.accept([token])
            predicted.append(sampler.sample(self.engine.logits(row), step + row))
        sampler.close()
        return predicted


def line_of(unsplit: Unsplit) -> list[int]:
    """The last token of the prompt, and what plain decoding makes of it."""
    last = len(unsplit.prompt) - 1
    line = [unsplit.prompt[-1]]
    while len(line) <= TOKENS:
        line += unsplit.verify(last + len(line) - 1, line[-1:])
    return line


async def verify(driver: Driver, window_id: int, position: int, tokens: Sequence[int]) -> list[int]:
    await driver.verify(window_id, position, tokens)
    reply = await driver.reply()
    assert reply.window_id == window_id
    return list(reply.predicted_tokens)


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stages", [1, 3])
async def test_speculative_decoding(
    load: Load, whole: LlamaEngine, stages: int, sampling: SamplingConfig | None
) -> None:
    prompt = (
        whole.vocabulary.tokenize(TEXT, add_special=True, parse_special=False) if whole.vocabulary else []
    )
    last = len(prompt) - 1
    plain = line_of(Unsplit(whole, prompt, sampling))
    unsplit = Unsplit(whole, prompt, sampling)
    with trio.fail_after(120):
        async with (
            toy_cluster(
                stages,
                transport=TcpTransport(),
                make_engine=load,
                layers=LAYERS,
                ctx_size=CTX,
                lane_count=1,
            ) as cluster,
            driver_of(cluster) as driver,
        ):
            await driver.start(prompt, sampling)
            # Guess well, guess badly in the middle, guess nothing: in turns, each from what was predicted.
            line, window_id, undone = [prompt[-1]], 0, 0
            while len(line) <= TOKENS:
                window_id += 1
                start = len(line) - 1
                guess = [*plain[len(line) : len(line) + 3], 1, 2, 3][: (3, 2, 0)[window_id % 3]]
                if window_id % 4 == 0 and guess:
                    guess[-1] = 1
                tokens = [line[-1], *guess]
                predicted = await verify(driver, window_id, last + start, tokens)
                assert predicted == unsplit.verify(last + start, tokens)
                taken = 0
                while taken < len(guess) and predicted[taken] == guess[taken]:
                    taken += 1
                undone += len(guess) - taken
                line += predicted[: taken + 1]
                if taken == len(guess):
                    await driver.send(K.RETIRE_VERIFY_WINDOW, last + start, token_count=len(tokens))
            assert undone >= 2, "no rewind was tried"
            assert window_id < len(line) - 5, "no guess was right"
            # One row is the batch of plain decoding; from the prompt on, that gives its tokens.
            again = [prompt[-1]]
            driver.generation = 1
            for start in range(8):
                again += await verify(driver, window_id + 1 + start, last + start, again[-1:])
            assert again == plain[: len(again)]
            for start in range(4):
                kind = (K.DECODE_EMBD, K.DECODE_LIGHT_CTX)[start % 2]
                assert await driver.decode(last + start, plain[start], kind) == plain[start + 1]
            assert (await driver.ask(K.STOP)).kind.name == "ACK"
            await wait_for_sequences(cluster)

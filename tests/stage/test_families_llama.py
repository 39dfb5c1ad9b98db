"""Families that need more than the residual stream fed as embeddings, through chains of real stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from skippy.engine import StageEngine
from skippy.frontend.generation import GenerationRequest
from skippy.models.tiny import write_tiny_model
from skippy.protocol import SamplingConfig
from tests.stage.test_chain import generate, generator_over
from tests.support.cached import cache_of, cached_cluster, complete
from tests.support.cluster import LAYERS, toy_cluster
from tests.support.driver import driver_of
from tests.support.whole_model import WholeModel, load_layers

PROMPT = [1, *range(5, 25)]
CHUNK = 7
TOKENS = 8
GREEDY = SamplingConfig(flags=3, temperature=0.0)


@pytest.mark.parametrize(
    ("name", "tokens", "widths"),
    [
        ("talkie", True, (256, 256)),  # every layer reads the embedding of the token
        ("qwen4exp", False, (1024, 1024)),  # hyper-connections: four streams cross
        ("kimi-k3", False, (256, 384)),  # the input, then also that of layer 3
        ("gemma2", False, (256, 256)),
        ("qwen35", False, (256, 256)),
    ],
)
async def test_three_stages_answer_as_the_whole_model_does(
    name: str, tokens: bool, widths: tuple[int, int], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", name, LAYERS)
    made: list[StageEngine] = []

    def make_engine(start: int, end: int, layers: int, **options: Any) -> Any:
        made.append(load_layers(model, start, end, max_sequences=options["max_sequences"]))
        return made[-1]

    request = GenerationRequest(prompt=PROMPT, max_tokens=TOKENS, sampling=GREEDY)
    with trio.fail_after(60):
        async with (
            toy_cluster(3, make_engine=make_engine, lane_count=1) as cluster,
            generator_over(cluster, lanes=1, chunk=CHUNK) as generator,
        ):
            found = await generate(generator, request)
    infos = sorted((engine.info for engine in made), key=lambda info: info.layer_start)
    assert tuple(info.output_width for info in infos[:2]) == widths
    assert tuple(info.input_width for info in infos[1:]) == widths
    assert [info.takes_tokens for info in infos] == [False, tokens, tokens]
    whole = load_layers(model, 0, LAYERS)
    assert found == WholeModel(whole, GREEDY, CHUNK).answer(PROMPT, TOKENS)
    whole.close()


@pytest.mark.parametrize(
    ("name", "sliceable"), [("talkie", True), ("gemma2", True), ("kimi-k3", False), ("qwen35", False)]
)
async def test_what_stages_remember_of_them_is_exact(name: str, sliceable: bool, tmp_path: Path) -> None:
    """Also where the stage in the middle has forgotten more than the others, and gets rows again."""
    model = write_tiny_model(tmp_path / "tiny.gguf", name, LAYERS)
    prompt = [1, *((i * 37 + 11) % 100 + 4 for i in range(50))]
    shared, last = 3 * CHUNK, len(prompt) - 1
    branch = [*prompt[:shared], *range(40, 50)]
    engine = load_layers(model, 0, LAYERS)
    whole = WholeModel(engine, GREEDY, CHUNK)
    right, right_branch = whole.answer(prompt, TOKENS), whole.answer(branch, TOKENS)
    whole.close()

    def make_engine(start: int, end: int, layers: int, **options: Any) -> Any:
        return load_layers(model, start, end, max_sequences=options["max_sequences"])

    kv = {"shared_prefix_record_limit": 4}
    with trio.fail_after(60):
        async with (
            cached_cluster(3, kv=kv, make_engine=make_engine, lane_count=2, ctx_size=256) as cluster,
            driver_of(cluster) as driver,
        ):

            async def ask(tokens: list[int], expected: list[int], restored: int) -> None:
                checkpoints = () if sliceable else (shared,)
                answer = await complete(
                    driver, tokens, TOKENS, sampling=GREEDY, chunk=CHUNK, checkpoints=checkpoints
                )
                assert (answer.restored, answer.tokens) == (restored, expected)
                for index in range(3):
                    states = cache_of(cluster, index).states
                    assert states is not None
                    await states.writer.wait_idle()

            await ask(prompt, right, 0)
            await ask(prompt, right, last)
            await ask(branch, right_branch, shared)
            middle = cache_of(cluster, 1)
            for entry in middle.index.entries():
                if entry.length > len(branch) + TOKENS:
                    middle.forget(entry)
            await ask(prompt, right, shared)
            await ask(prompt, right, last)
            assert middle.index.counters.errors == 0

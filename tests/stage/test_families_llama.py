"""Families that need more than the residual stream fed as embeddings, through chains of real stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from skippy.engine import EngineOptions, StageEngine
from skippy.engine.llama import LlamaEngine
from skippy.frontend.generation import GenerationRequest
from skippy.models import ensure_slice
from skippy.models.tiny import write_tiny_model
from skippy.protocol import SamplingConfig
from tests.stage.test_chain import generate, generator_over
from tests.support.cluster import LAYERS, toy_cluster
from tests.support.whole_model import WholeModel

PROMPT = [1, *range(5, 25)]
CHUNK = 7
TOKENS = 8
GREEDY = SamplingConfig(flags=3, temperature=0.0)


def load(model: Path, start: int, end: int, max_sequences: int = 1) -> StageEngine:
    options = EngineOptions(context_length=256, max_sequences=max_sequences, n_threads=1)
    return LlamaEngine.load(ensure_slice(model, start, end, cache_dir=model.parent), options)


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
        made.append(load(model, start, end, options["max_sequences"]))
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
    whole = load(model, 0, LAYERS)
    assert found == WholeModel(whole, GREEDY, CHUNK).answer(PROMPT, TOKENS)
    whole.close()

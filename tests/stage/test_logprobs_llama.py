"""Log-probabilities of llama.cpp's logits, through chains of stages that load slices of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from skippy.engine import Segment
from skippy.frontend.generation import GenerationRequest
from skippy.stage.scoring import score
from tests.stage.test_chain import generator_over
from tests.stage.test_logprobs import ask, check_close
from tests.support.cluster import LAYERS, toy_cluster
from tests.support.tiny_models import write_tiny
from tests.support.whole_model import load_layers

PROMPT = [1, *range(5, 25)]
CHUNK = 7
TOP = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=LAYERS, weights="Q8_0")


def unsplit(model: Path, tokens: list[int]) -> list[Any]:
    """What the whole model says of ``tokens`` behind the prompt, in the batches that a chain computes."""
    engine = load_layers(model, 0, LAYERS)
    try:
        for start in range(0, len(PROMPT) - 1, CHUNK):
            chunk = PROMPT[start : min(start + CHUNK, len(PROMPT) - 1)]
            engine.decode([Segment(0, start, len(chunk), tokens=chunk)])
        scores = []
        for step, current in enumerate([PROMPT[-1], *tokens[:-1]]):
            engine.decode([Segment(0, len(PROMPT) - 1 + step, 1, tokens=[current], logits=1)])
            scores.append(score(engine.logits(0), tokens[step], TOP))
        return scores
    finally:
        engine.close()


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_the_scores_are_the_unsplit_models(stages: int, model: Path) -> None:
    def make_engine(start: int, end: int, layers: int, **options: Any) -> Any:
        return load_layers(model, start, end, max_sequences=options["max_sequences"])

    request = GenerationRequest(prompt=PROMPT, max_tokens=5, top_logprobs=TOP)
    with trio.fail_after(60):
        async with (
            toy_cluster(stages, make_engine=make_engine, lane_count=1) as cluster,
            generator_over(cluster, lanes=1, chunk=CHUNK) as generator,
        ):
            tokens, scores = await ask(generator, request)
    assert len(tokens) > 0
    check_close([each for each in scores if each], unsplit(model, tokens))

"""Replays on llama.cpp: to the token what the whole model gives that computes again at the same token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from skippy.frontend.generation import GenerationRequest
from skippy.protocol import MessageKind, SamplingConfig
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import generate, generator_over
from tests.support.cluster import LAYERS, toy_cluster
from tests.support.lossy import Fate, Frame, LossyTransport
from tests.support.tiny_models import write_tiny
from tests.support.whole_model import WholeModel, load_layers

PROMPT = [1, *range(5, 25)]
CHUNK = 7
TOKENS = 24
SAMPLED = SamplingConfig(
    flags=3,  # enabled, and the end of a sequence is ignored
    seed=23,
    temperature=1.1,
    top_k=60,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repeat_penalty=1.3,
    dry_multiplier=0.8,
    dry_allowed_length=1,
    xtc_probability=0.3,
    xtc_threshold=0.05,
)
GREEDY = SamplingConfig(flags=3, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=LAYERS, weights="Q8_0")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stages", [2, 3])
async def test_the_answer_goes_on_as_the_whole_model_would(
    stages: int, sampling: SamplingConfig, model: Path
) -> None:
    """Two stages are lost in the middle of one answer, one after the other."""
    transport, sink = LossyTransport(), MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)

    def make_engine(start: int, end: int, layers: int, **options: Any) -> Any:
        return load_layers(model, start, end, max_sequences=options["max_sequences"])

    left = [9, 6]
    """Decode steps of which the last one is lost."""

    def fate(frame: Frame) -> Fate:
        if frame.port != 20_001 or frame.kind != MessageKind.DECODE_EMBD or not left:
            return None
        left[0] -= 1
        if left[0]:
            return None
        left.pop(0)
        return "lose"

    transport.fate = fate
    request = GenerationRequest(prompt=PROMPT, max_tokens=TOKENS, sampling=sampling)
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            async with (
                toy_cluster(
                    stages, make_engine=make_engine, lane_count=1, transport=transport, telemetry=telemetry
                ) as cluster,
                generator_over(cluster, lanes=1, chunk=CHUNK) as generator,
            ):
                tokens = await generate(generator, request)
            nursery.cancel_scope.cancel()
    begun = [event for event in sink.events if event.name == names.STAGE_OPENAI_REPLAY_BEGIN]
    replays = [dict(event.attributes)["generated_token_count"] for event in begun]
    assert replays == [8, 8 + 1 + 5]
    whole = WholeModel(load_layers(model, 0, LAYERS), sampling, CHUNK)
    try:
        assert tokens == whole.answer(PROMPT, TOKENS, replays)
    finally:
        whole.close()

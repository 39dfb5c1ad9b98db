"""Log-probabilities come with the tokens, where they were asked for: those of the unsplit model."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest, InvalidSampling
from skippy.protocol import (
    ANNEX_EXTENSION,
    AnnexedReplyDecoder,
    FinishHint,
    Message,
    MessageKind,
    PositionLogProbabilities,
    ReplyAnnex,
    SamplingConfig,
    TokenLogProbability,
    default_state,
    encode_message,
)
from skippy.stage import GenerationSettings, SettingsRefused, service
from skippy.stage.admission import StageAdmission, make_admission
from skippy.stage.framing import receive_reply
from skippy.stage.links import TcpTransport
from skippy.stage.scoring import log_softmax, score
from skippy.stage.session import StageSession
from skippy.stage.settings import parse_metadata
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens, wait_for_sequences
from tests.support.cluster import LAYERS, toy_cluster
from tests.support.dialing import dial_lane
from tests.support.driver import driver_of

K = MessageKind
SEEDED = SamplingConfig(
    flags=1, seed=11, temperature=0.9, top_k=40, repeat_penalty=1.3, logit_bias=((65, 2.5),)
)
REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=6)


def unsplit_scores(prompt: list[int], tokens: list[int], top: int) -> list[PositionLogProbabilities]:
    """What the whole model says of the tokens that follow the prompt, in f64 by the textbook's formula."""
    engine = ToyEngine(0, LAYERS, LAYERS)
    if len(prompt) > 1:
        engine.decode([Segment(0, 0, len(prompt) - 1, tokens=prompt[:-1])])
    scores, current = [], prompt[-1]
    for step, token in enumerate(tokens):
        engine.decode([Segment(0, len(prompt) - 1 + step, 1, tokens=[current], logits=1)])
        logits = engine.logits(0).astype(np.float64)
        values = logits - math.log(np.exp(logits).sum())
        order = sorted(range(len(values)), key=lambda each: (-values[each], each))[:top]
        pairs = [TokenLogProbability(each, float(values[each])) for each in (token, *order)]
        scores.append(PositionLogProbabilities(pairs[0], tuple(pairs[1:])))
        current = token
    return scores


def check_close(found: list[PositionLogProbabilities], wanted: list[PositionLogProbabilities]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        pairs, expected = [one.chosen, *one.top], [other.chosen, *other.top]
        assert [pair.token for pair in pairs] == [pair.token for pair in expected]
        assert [pair.log_probability for pair in pairs] == pytest.approx(
            [pair.log_probability for pair in expected], abs=1e-5
        )


async def ask(
    generator: ChainGenerator, request: GenerationRequest
) -> tuple[list[int], list[PositionLogProbabilities | None]]:
    async with generator.generate(request) as stream:
        assert stream.logprobs is None
        pairs = [(token, stream.logprobs) async for token in stream]
    return [token for token, _ in pairs], [scores for _, scores in pairs]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
async def test_the_scores_are_the_unsplit_models(
    stages: int, top: int, sampling: SamplingConfig | None
) -> None:
    """Of the raw logits: what a penalty, a bias or a temperature did to them does not show."""
    request = attrs.evolve(REQUEST, top_logprobs=top, sampling=sampling)
    expected = unsplit_tokens(PROMPT, 6, sampling)
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, generator_over(cluster, lanes=1) as generator:
            tokens, scores = await ask(generator, request)
            assert tokens == expected
            check_close([each for each in scores if each], unsplit_scores(PROMPT, tokens, top))
            # The next request on the same lane asks for none, and gets none.
            tokens, scores = await ask(generator, attrs.evolve(request, top_logprobs=None))
            assert tokens == expected
            assert scores == [None] * 6
            await wait_for_sequences(cluster)


async def test_the_scores_come_over_real_links() -> None:
    request = attrs.evolve(REQUEST, top_logprobs=3)
    with trio.fail_after(20):
        async with (
            toy_cluster(3, transport=TcpTransport()) as cluster,
            generator_over(cluster) as generator,
        ):
            tokens, scores = await ask(generator, request)
    check_close([each for each in scores if each], unsplit_scores(PROMPT, tokens, 3))


def frame(kind: MessageKind, position: int = 0, tokens: Any = (), **fields: Any) -> Message:
    state = attrs.evolve(default_state(kind), prompt_token_count=len(PROMPT), **fields.pop("state", {}))
    return Message(
        kind,
        state,
        pos_start=position,
        token_count=len(tokens),
        tokens=tokens,
        request_id=3,
        session_id=4,
        **fields,
    )


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_a_verify_window_has_scores_for_each_of_its_tokens(stages: int) -> None:
    """A driver of its own, which agreed to the annex, gets them on its lane."""
    line = [PROMPT[-1], *unsplit_tokens(PROMPT, 4)]
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster:
            link, decoder = await dial_lane(cluster.first, ANNEX_EXTENSION), AnnexedReplyDecoder()
            for message in (
                frame(K.CONFIGURE_GENERATION, chat_sampling_metadata='{"top_logprobs": 2}'),
                frame(K.PREFILL_EMBD, 0, PROMPT[:-1]),
                frame(K.VERIFY_WINDOW, len(PROMPT) - 1, line[:4], state={"decode_step": 0, "seq_id": 1}),
            ):
                await link.send(encode_message(message))
                reply = await receive_reply(link, decoder)
            assert reply is not None
            assert list(reply.predicted_tokens) == line[1:]
            assert decoder.annex is not None
            check_close(list(decoder.annex.log_probabilities), unsplit_scores(PROMPT, line[1:], 2))
            link.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"top_logprobs": 21}', "chat sampling metadata: field 'top_logprobs' must be 0 to 20"),
        ('{"top_logprobs": -1}', "chat sampling metadata: field 'top_logprobs' must be 0 to 20"),
        ('{"top_logprobs": "2"}', "field 'top_logprobs' must be an integer, not a string"),
        ('{"top_logprobs": null}', "field 'top_logprobs' must be an integer, not null"),
        ('{"cache_namespace": "Ab"}', "cache_namespace is 'Ab', must be 1 to 64 lower-case hexadecimal"),
        ('{"cache_namespace": ""}', "cache_namespace is '', must be 1 to 64"),
        ('{"cache_namespace": "%s"}' % ("a" * 65), "must be 1 to 64 lower-case hexadecimal digits"),
        ('{"cache_audit": 0}', "field 'cache_audit' must be 1 to 2147483647"),
        ('{"cache_checkpoints": [3, 3]}', "cache_checkpoints must be at most 1024 ascending lengths"),
        ('{"cache_checkpoints": [0]}', "must be a list of integers from 1 to 2147483647"),
        ('{"cache_checkpoints": [true]}', "must be a list of integers from 1 to 2147483647"),
        ('{"cache_checkpoints": %s}' % [*range(1, 1026)], "at most 1024 ascending lengths"),
        ('{"cache_chunks": [0]}', "must be a list of integers from 1 to 2147483647"),
        ('{"cache_chunks": %s}' % ([7] * 1025), "cache_chunks has 1025 sizes; at most 1024"),
        ('{"cache_drop": "everything"}', "cache_drop is 'everything', must be all, common or 1 to 64 lower-"),
        ('{"cache_namespace": 7}', "field 'cache_namespace' must be a string, not an integer"),
        ('{"gbnf": "root ::= x"}', "chat sampling metadata: unknown field 'gbnf'"),
        ('{"grammar": ""}', "chat sampling metadata: grammar is empty"),
        ('{"grammar": 5}', "field 'grammar' must be a string, not an integer"),
        ("[1]", "chat sampling metadata must be an object, not a list"),
        ("[" * 10_000, "chat sampling metadata is "),
        ("{", "chat sampling metadata is not JSON: "),
        (" " * 524_289, "chat sampling metadata of 524289 characters; at most 524288 are allowed"),
    ],
)
def test_bad_metadata_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(SettingsRefused) as caught:
        parse_metadata(text)
    assert reason in str(caught.value)


def test_metadata_that_asks_for_nothing() -> None:
    assert [parse_metadata(text) for text in (None, "", "{}")] == [GenerationSettings()] * 3
    assert GenerationSettings().to_metadata() is None
    assert GenerationSettings(0).to_metadata() == '{"top_logprobs":0}'
    assert parse_metadata(GenerationSettings(20).to_metadata()) == GenerationSettings(20)
    for drop in ("all", "common", "0a", ""):
        settings = GenerationSettings(
            None, "ab" * 32, 77, drop, cache_checkpoints=(1, 5), cache_chunks=(9, 5)
        )
        assert parse_metadata(settings.to_metadata()) == settings


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_too_many_are_the_clients_fault(stages: int) -> None:
    with trio.fail_after(20):
        async with (
            toy_cluster(stages, transport=TcpTransport()) as cluster,
            generator_over(cluster) as generator,
        ):
            with pytest.raises(InvalidSampling, match="'top_logprobs' must be 0 to 20"):
                await generate(generator, attrs.evolve(REQUEST, top_logprobs=21))
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 6)


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_a_driver_without_the_annex_is_refused(stages: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            asking = frame(K.CONFIGURE_GENERATION, chat_sampling_metadata='{"top_logprobs": 2}')
            await driver.link.send(encode_message(asking))
            assert await driver.ended()
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("plain", ["downstream", "stage_zero"])
async def test_a_chain_with_a_plain_peer_refuses_and_says_what(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that offer no extension, on lanes or on the return stream, stand for plain generation-8 ones."""

    def plainer(*args: Any, **kwargs: Any) -> StageAdmission:
        admission = make_admission(*args, **kwargs)
        request = getattr(admission, plain)
        return attrs.evolve(admission, **{plain: request and attrs.evolve(request, extensions=())})

    monkeypatch.setattr(service, "make_admission", plainer)
    with trio.fail_after(20):
        async with toy_cluster(3) as cluster, generator_over(cluster) as generator:
            if plain == "downstream":
                with pytest.raises(InvalidSampling, match="top_logprobs: log-probabilities travel in the"):
                    await generate(generator, attrs.evolve(REQUEST, top_logprobs=2))
            else:
                with pytest.raises(InvalidSampling, match="a neighbour of stage 2 did not agree"):
                    await generate(generator, attrs.evolve(REQUEST, top_logprobs=2))
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 6)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("hint", FinishHint)
async def test_a_last_stage_that_knows_the_end_is_believed(
    hint: FinishHint, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No grammar says so yet, so its word is put in: after the third token nothing may follow."""
    taken = 0
    take_annex = StageSession.take_annex

    def take_with_hint(session: StageSession) -> ReplyAnnex | None:
        nonlocal taken
        annex = take_annex(session)
        taken += 1
        return attrs.evolve(annex, finish_hint=hint) if annex is not None and taken == 3 else annex

    monkeypatch.setattr(StageSession, "take_annex", take_with_hint)
    with trio.fail_after(20):
        async with (
            toy_cluster(stages, transport=TcpTransport()) as cluster,
            generator_over(cluster) as generator,
            generator.generate(attrs.evolve(REQUEST, top_logprobs=0)) as stream,
        ):
            tokens = [token async for token in stream]
            ends = hint is FinishHint.MUST_END
            assert tokens == unsplit_tokens(PROMPT, 3 if ends else 6)
            assert stream.finish_reason == ("stop" if ends else "length")


def test_ties_and_impossible_tokens() -> None:
    logits = np.array([1, 3, -np.inf, 3, 1, 3], np.float32)
    found = score(logits, 2, 4)
    assert found.chosen == TokenLogProbability(2, -math.inf)
    assert [pair.token for pair in found.top] == [1, 3, 5, 0]
    assert found.top[0].log_probability == pytest.approx(3 - math.log(3 * math.e**3 + 2 * math.e), abs=1e-6)
    assert len(score(logits, 0, 20).top) == 6
    assert score(logits, 0, 0).top == ()
    assert log_softmax(logits).dtype == np.float32
    assert np.exp(log_softmax(np.array([1000, 0], np.float32))).tolist() == [1, 0]

"""Several choices of one answer: the official client, lanes, failures, counts."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import attrs
import httpx
import openai
import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.choices import Choice, ChoiceResult, choice_sampling
from skippy.frontend.generation import ChainUnavailable, GenerationRequest
from skippy.protocol import PositionLogProbabilities, SamplingConfig, TokenLogProbability

from .support import MODEL, ScriptedGenerator, Step, chat_body, client, completion_body, say, serving

LETTERS = "abcdefgh"


def by_seed(first: int) -> Any:
    """A script that says the letter of its choice three times."""

    def script(request: GenerationRequest) -> list[Step]:
        assert request.sampling is not None
        return [ord(LETTERS[request.sampling.seed - first])] * 3

    return script


def streamed(text: str) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """Texts and finish reasons of the choices of a stream, and its chunks."""
    chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "a choice went on after its end"
            texts[index] += choice.get("text", "") or choice.get("delta", {}).get("content", "")
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return texts, reasons, chunks


@pytest.mark.parametrize("n", [1, 2, 4, 8])
async def test_each_choice_has_its_own_seed(n: int) -> None:
    """More of them than lanes take their turns."""
    generator = ScriptedGenerator(by_seed(7))
    expected = {index: LETTERS[index] * 3 for index in range(n)}
    body = chat_body(n=n, seed=7)
    async with client(generator) as http:
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await http.post("/v1/chat/completions", json=body)
    assert {choice["index"]: choice["message"]["content"] for choice in whole["choices"]} == expected
    texts, reasons, chunks = streamed(answer.text)
    assert texts == expected
    assert reasons == dict.fromkeys(range(n), "stop")
    assert whole["usage"]["completion_tokens"] == 3 * n
    assert whole["usage"]["prompt_tokens"] == len(generator.requests[0].prompt)
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(generator.shared) == (2 if n > 1 else 0)
    assert generator.active == 0


async def test_choices_run_at_once_and_their_chunks_mix() -> None:
    steps = [trio.Event() for _ in range(4)]

    def script(request: GenerationRequest) -> list[Step]:
        assert request.sampling is not None
        first = request.sampling.seed
        return [ord("a"), steps[first], ord("b"), steps[2 + first]]

    generator = ScriptedGenerator(script)
    seen = []
    async with (
        serving(generator) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as asynchronous,
    ):
        stream = await asynchronous.completions.create(model=MODEL, prompt="x", n=2, seed=0, stream=True)
        order = iter((1, 0, 2, 3))  # the second choice goes on first; the first ends first
        async for chunk in stream:
            choice = chunk.choices[0]
            seen.append((choice.index, choice.text, choice.finish_reason))
            if len(seen) >= 2 and (step := next(order, None)) is not None:
                steps[step].set()
    assert sorted(seen[:2]) == [(0, "a", None), (1, "a", None)]
    assert seen[2:] == [(1, "b", None), (0, "b", None), (0, "", "stop"), (1, "", "stop")]


@pytest.mark.parametrize("n", [2, 6])
async def test_only_the_first_choice_may_be_refused(n: int) -> None:
    """The others come when it has its lane, and are told apart."""
    generator = ScriptedGenerator(lambda _: list(b"ab"))
    async with client(generator) as http:
        answer = await http.post("/v1/completions", json=completion_body(["x", "yz"], n=n))
    assert [choice["text"] for choice in answer.json()["choices"]] == ["ab"] * (2 * n)
    assert [request.admitted for request in generator.requests] == [False] + [True] * (2 * n - 1)
    assert [request.admitted for request in generator.shared] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_failure_of_one_ends_the_answer(stream: bool) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        assert request.sampling is not None
        if request.sampling.seed == 1:
            return [ord("a"), ChainUnavailable("stage 1 was lost")]
        return [ord("b"), trio.Event()]

    generator = ScriptedGenerator(script)
    async with client(generator) as http:
        answer = await http.post("/v1/completions", json=completion_body(n=3, seed=0, stream=stream))
        assert generator.active == 0
    if stream:
        events = answer.text.split("\n\n")
        assert json.loads(events[-3][6:])["error"]["message"] == "stage 1 was lost"
        assert events[-2:] == ["data: [DONE]", ""]
    else:
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "stage 1 was lost"


async def test_a_client_that_leaves_frees_all_lanes() -> None:
    generator = ScriptedGenerator(lambda _: [97, trio.Event()])
    async with client(generator) as http:
        body = completion_body(n=6, stream=True)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
            while generator.active < 4:
                await trio.lowlevel.checkpoint()
        await generator.idle.wait()
    assert len(generator.requests) == 4


async def test_a_prompt_that_cannot_be_computed_ends_the_answer() -> None:
    class Failing(ScriptedGenerator):
        async def share(self, request: GenerationRequest) -> int:
            raise ChainUnavailable("no stage")

    async with client(Failing(say("x"))) as http:
        answer = await http.post("/v1/completions", json=completion_body(n=2))
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no stage")


async def test_several_prompts_are_several_choices() -> None:
    generator = ScriptedGenerator(lambda request: list(request.prompt))
    vocabulary = ToyVocabulary()
    async with client(generator) as http:

        async def ask(prompt: Any, **more: Any) -> list[str]:
            answer: httpx.Response = await http.post("/v1/completions", json=completion_body(prompt, **more))
            choices = answer.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(len(choices)))
            return [choice["text"] for choice in choices]

        assert await ask(["one", "two", "three"]) == ["one", "two", "three"]
        assert await ask([[97, 98], [99]]) == ["ab", "c"]
        assert await ask([97, 98]) == ["ab"]
        assert await ask(["one", "two"], n=2) == ["one", "one", "two", "two"]
        assert await ask(["one", "two"], echo=True) == ["oneone", "twotwo"]
        assert await ask([[97, 98], [vocabulary.IM_END, 99]], echo=True) == ["abab", "<|im_end|>cc"]
        answer = await http.post(
            "/v1/completions", json=completion_body(["one", "two"], echo=True, stream=True)
        )
        assert streamed(answer.text)[0] == {0: "oneone", 1: "twotwo"}
        whole = (await http.post("/v1/completions", json=completion_body(["ab", "cde"]))).json()
        # One token in front of each: the toy's BOS, which has no text.
        assert whole["usage"]["prompt_tokens"] == 3 + 4
        assert whole["usage"]["completion_tokens"] == 3 + 4
        answer = await http.post("/v1/completions", json=completion_body([[1], [2, 999]]))
        assert answer.json()["error"]["param"] == "prompt[1][1]"


def test_the_first_choice_is_what_one_choice_would_be() -> None:
    sampling = SamplingConfig(flags=1, seed=2**32 - 2)
    assert [getattr(choice_sampling(sampling, n), "seed", None) for n in range(4)] == [
        2**32 - 2,
        2**32 - 1,
        0,
        1,
    ]
    assert choice_sampling(sampling, 0) is sampling
    assert choice_sampling(None, 3) is None


def scored(token: int) -> PositionLogProbabilities:
    return PositionLogProbabilities(TokenLogProbability(token, -1.0))


@attrs.frozen
class Said:
    whole: ChoiceResult
    pieces: list[str]
    stopped: bool


def say_all(data: bytes, stops: list[str], *, with_scores: bool) -> Said:
    """The whole of what a choice makes of a token for each byte, up to the stop string, as a driver would."""
    choice = Choice(0, ToyVocabulary(), stops, scored=with_scores)
    whole, pieces = ChoiceResult(), []
    for token in data:
        if (piece := choice.feed(token, scored(token) if with_scores else None)) is not None:
            whole.add(piece)
            pieces.append(piece.text)
        if choice.stopped:
            break
    last = choice.finish("length")
    whole.add(last)
    return Said(whole, [*pieces, last.text], choice.stopped)


# Characters of one to four bytes, and pairs that only make sense together.
_ALPHABET = "ab\n é\u0301汉字ひ🙂👩🏽\u200d\U0001f1e9\U0001f1ea"
_TEXTS = st.text(_ALPHABET, max_size=40)


@settings(deadline=None)
@given(_TEXTS, st.data())
def test_stop_strings_are_found_wherever_they_fall(text: str, data: st.DataObject) -> None:
    """Also those of 20 characters that end inside the text's last token or begin in its first one."""
    cuts = st.integers(0, max(0, len(text) - 1)).flatmap(
        lambda start: st.integers(1, 20).map(lambda size: text[start : start + size])
    )
    others = st.text(_ALPHABET, min_size=1, max_size=20)
    stops = [stop for stop in data.draw(st.lists(cuts | others, max_size=3)) if stop]
    found = [start for stop in stops if (start := text.find(stop)) >= 0]
    said = say_all(text.encode(), stops, with_scores=False)
    assert said.whole.text == text[: min(found)] if found else said.whole.text == text
    assert said.whole.finish_reason == ("stop" if found else "length")
    # No character is ever broken: what each piece has is characters of the text, and no replacements.
    assert "".join(said.pieces) == said.whole.text
    assert "\ufffd" not in said.whole.text


@settings(deadline=None)
@given(
    _TEXTS.map(str.encode) | st.binary(max_size=40),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=2),
)
def test_scores_come_with_their_text(data: bytes, stops: list[str]) -> None:
    """Each token's come once, in order, with the piece in which its last character is; none behind it."""
    said = say_all(data, stops, with_scores=True)
    assert say_all(data, stops, with_scores=False).whole.text == said.whole.text
    tokens = [each.position.chosen.token for each in said.whole.scores]
    assert tokens == list(data[: len(tokens)])
    starts = [each.start for each in said.whole.scores]
    assert starts == sorted(starts)
    if not said.stopped:
        assert len(tokens) == len(data)
    else:
        assert all(start < len(said.whole.text) for start in starts)
        shown = bytes(tokens).decode("utf-8", "replace")
        assert shown.startswith(said.whole.text) or "\ufffd" in shown
    for start, token in zip(starts, tokens, strict=True):
        if token < 0x80 and "\ufffd" not in data.decode("utf-8", "replace"):
            assert said.whole.text[start] == chr(token)

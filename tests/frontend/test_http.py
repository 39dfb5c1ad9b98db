"""The routes over real HTTP: shapes of answers and streams, errors, disconnects."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest
import trio

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.generation import ChainUnavailable, InvalidSampling, TooManyRequests
from skippy.frontend.options import FrontendOptions
from skippy.telemetry import Level, MemorySink, Telemetry, names

from .support import MODEL, ScriptedGenerator, chat_body, client, completion_body, say


def frames(text: str) -> list[Any]:
    """The events of a stream; the last one must be [DONE]."""
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_models_and_health() -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        listing = (await http.get("/v1/models")).json()
        assert listing["object"] == "list"
        assert [model["id"] for model in listing["data"]] == [MODEL]
        model = (await http.get(f"/v1/models/{MODEL}")).json()
        assert model.pop("chat_template")["tool_format"] == "generic"
        assert model == listing["data"][0]
        for path in ("/health", "/healthz"):
            assert (await http.get(path)).json() == {"status": "ok"}
        assert (await http.get("/readyz")).status_code == 200
        generator.unready = "the chain is not ready: stage two sleeps"
        answer = await http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "service_unavailable"
        assert answer.json()["error"]["message"] == "the chain is not ready: stage two sleeps"
        assert (await http.get("/healthz")).status_code == 200


async def test_chat() -> None:
    generator = ScriptedGenerator(say("héllo"))
    async with client(generator) as http:
        answer = await http.post("/v1/chat/completions", json=chat_body("hi"))
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "héllo", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = generator.vocabulary.tokenize(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special=True, parse_special=True
    )
    assert generator.requests[0].prompt == prompt
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 6,
        "total_tokens": len(prompt) + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream(include_usage: bool) -> None:
    body = chat_body(stream=True, stream_options={"include_usage": include_usage})
    async with client(ScriptedGenerator(say("a€b"))) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = frames(answer.text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    usage = chunks.pop() if include_usage else None
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {"content": "€"}, {"content": "b"}, {},
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
        assert all(chunk["usage"] is None for chunk in chunks)


async def test_ids_are_unique() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        ids = {(await http.post("/v1/chat/completions", json=chat_body())).json()["id"] for _ in range(3)}
    assert len(ids) == 3


async def test_completion() -> None:
    generator = ScriptedGenerator(say("abc"))
    async with client(generator) as http:
        whole = (await http.post("/v1/completions", json=completion_body("<s>hi"))).json()
        stream = await http.post("/v1/completions", json=completion_body([1, 2], stream=True))
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")
    assert whole["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    # The BOS in the text is the only one.
    assert generator.requests[0].prompt == [256, *b"hi"]
    assert generator.requests[1].prompt == [1, 2]
    chunks = frames(stream.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens(stream: bool) -> None:
    generator = ScriptedGenerator(say("one STOP two"))
    async with client(generator) as http:
        answer = await http.post("/v1/completions", json=completion_body(stop=["STOP"], stream=stream))
    if stream:
        chunks = frames(answer.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        body = answer.json()
        assert body["choices"][0]["text"] == "one "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len("one STOP")
    assert generator.active == 0


async def test_leftover_bytes_become_replacement_characters() -> None:
    async with client(ScriptedGenerator(say(b"a\xe2\x82"))) as http:
        body = (await http.post("/v1/completions", json=completion_body())).json()
    assert body["choices"][0]["text"] == "a\ufffd"


async def test_max_tokens() -> None:
    generator = ScriptedGenerator(say("x" * 600), context_length=100)
    async with client(generator, FrontendOptions(default_max_tokens=7)) as http:

        async def run(**more: Any) -> tuple[int, str]:
            body = (await http.post("/v1/chat/completions", json=chat_body(**more))).json()
            return body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]

        assert await run() == (7, "length")
        assert await run(max_tokens=3) == (3, "length")
        assert await run(max_tokens=3, max_completion_tokens=5) == (5, "length")
        room = 100 - len(generator.requests[0].prompt)
        assert await run(max_tokens=5000) == (room, "length")
        assert await run(max_tokens=2**32 - 1) == (room, "length")


async def test_default_max_tokens_is_the_rest_of_the_context() -> None:
    generator = ScriptedGenerator(say("x" * 600), context_length=50)
    async with client(generator) as http:
        body = (await http.post("/v1/completions", json=completion_body([1] * 20))).json()
    assert body["usage"]["completion_tokens"] == 30


async def test_prompt_longer_than_the_context() -> None:
    async with client(ScriptedGenerator(say("x"), context_length=20)) as http:
        chat = await http.post("/v1/chat/completions", json=chat_body())
        text = await http.post("/v1/completions", json=completion_body([1] * 20))
        assert (await http.post("/v1/completions", json=completion_body([1] * 19))).status_code == 200
    for answer, param, count in ((chat, "messages", "22"), (text, "prompt", "20")):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        assert count in error["message"]
        assert "context of 20" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ChainUnavailable("stage 1 was lost"), 503, "service_unavailable"),
        (InvalidSampling("typical_p is not supported by this engine"), 400, "invalid_value"),
        (ExceptionGroup("both", [ChainUnavailable("stage 1 was lost")]), 503, "service_unavailable"),
        (RuntimeError("secret detail"), 500, "internal_server_error"),
    ],
)
async def test_failure_before_the_first_token(
    stream: bool, failure: Exception, status: int, code: str
) -> None:
    generator = ScriptedGenerator(lambda request: [failure])
    async with client(generator) as http:
        answer = await http.post("/v1/chat/completions", json=chat_body(stream=stream))
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert "secret" not in answer.text
        assert answer.json()["error"]["param"] == ("typical_p" if status == 400 else None)
        generator.script = say("fine")
        assert (await http.post("/v1/chat/completions", json=chat_body())).status_code == 200


async def test_failure_on_entering() -> None:
    generator = ScriptedGenerator(say("x"))
    generator.entry_error = ChainUnavailable("no lane")
    async with client(generator) as http:
        answer = await http.post("/v1/chat/completions", json=chat_body(stream=True))
        generator.entry_error = TooManyRequests("the queue is full")
        full = await http.post("/v1/chat/completions", json=chat_body())
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no lane"
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert full.json()["error"]["type"] == "rate_limit_error"


async def test_failure_mid_stream() -> None:
    generator = ScriptedGenerator(lambda request: [97, 98, ChainUnavailable("stage 1 was lost")])
    async with client(generator) as http:
        answer = await http.post("/v1/chat/completions", json=chat_body(stream=True))
        whole = await http.post("/v1/chat/completions", json=chat_body())
    assert answer.status_code == 200
    chunks = frames(answer.text)
    assert chunks[-1]["error"] == {
        "message": "stage 1 was lost",
        "type": "server_error",
        "param": None,
        "code": "service_unavailable",
    }
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "ab"
    assert whole.status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "//v1/models", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/static/x", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/live", 405, "method_not_allowed"),
        ("FOO", "/live", 405, "method_not_allowed"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed"),
    ],
)
async def test_errors_of_routing(method: str, path: str, status: int, code: str) -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert uuid.UUID(answer.headers["x-request-id"])


async def test_request_id() -> None:
    given = uuid.uuid4()
    async with client(ScriptedGenerator(say("x"))) as http:
        kept = await http.get("/health", headers={"x-request-id": given.hex.upper()})
        replaced = await http.get("/health", headers={"x-request-id": "not-a-uuid"})
    assert kept.headers["x-request-id"] == str(given)
    assert uuid.UUID(replaced.headers["x-request-id"]).version == 4


_USER = '"messages":[{"role":"user","content":"hi"}]'
_HEAD = f'{{"model":"{MODEL}",'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"text"', None),
        (b'{"model": "\xff"}', None),
        (b"\xef\xbb\xbf{}", None),
        (b"[" * 200_000, None),
        (b'{"a":' * 5_000, None),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", None),
        ((_HEAD + _USER + ',"temperature":NaN}').encode(), None),
        ((_HEAD + _USER + ',"temperature":1e999}').encode(), None),
        ((_HEAD + _USER + ',"seed":' + "9" * 5000 + "}").encode(), None),
        ((_HEAD + _USER + ',"user":"\\ud800"}').encode(), None),
        ((_HEAD + _HEAD[1:] + _USER + "}").encode(), None),
        (b"{}", "model"),
        ((_HEAD + '"messages":[]}').encode(), "messages"),
        ((_HEAD + '"messages":{}}').encode(), "messages"),
        ((_HEAD + _USER + ',"n":129}').encode(), "n"),
        ((_HEAD + _USER + ',"temprature":1}').encode(), "temprature"),
    ],
)
async def test_malformed_bodies(body: bytes, param: str | None) -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        headers = {"content-type": "application/json"}
        answer = await http.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert (await http.post("/v1/chat/completions", json=chat_body())).status_code == 200
    assert len(generator.requests) == 1


async def test_unknown_model_and_bad_tokens() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.post("/v1/chat/completions", json={**chat_body(), "model": "gpt-4o"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        for body, param in (
            (completion_body([1, 260]), "prompt[1]"),
            (completion_body("x", logit_bias={"260": 1}), "logit_bias"),
        ):
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


class _Unbreakable(ToyVocabulary):
    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raise ValueError("text has 100000 characters without a break")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", completion_body(["a", "b"]), "prompt"),
        ("chat/completions", chat_body(), "messages"),
        ("responses", {"model": MODEL, "input": "a"}, "input"),
        ("messages", {**chat_body(), "max_tokens": 1}, "messages"),
    ],
)
async def test_text_that_no_tokenizer_takes(path: str, body: dict[str, Any], param: str) -> None:
    async with client(ScriptedGenerator(say("x"), vocabulary=_Unbreakable())) as http:
        answer = await http.post(f"/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "without a break" in answer.json()["error"]["message"]


async def test_body_limits() -> None:
    async with client(ScriptedGenerator(say("x")), FrontendOptions(max_body_bytes=100_000)) as http:
        large = await http.post("/v1/completions", json=completion_body("x" * 200_000))
        huge = await http.post("/v1/completions", content=b" " * 3_000_000)
        form = await http.post("/v1/completions", data={"model": MODEL})
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        compressed = await http.post("/v1/completions", content=b"\x1f\x8b", headers=packed)
        fits = await http.post("/v1/completions", json=completion_body("x" * 90_000))
    for answer in (large, huge):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "payload_too_large"
    assert form.status_code == 415
    assert compressed.status_code == 415
    assert "gzip" in compressed.json()["error"]["message"]
    assert fits.json()["error"]["code"] == "context_length_exceeded"


async def test_body_that_never_comes() -> None:
    async with client(ScriptedGenerator(say("x")), FrontendOptions(body_timeout_secs=0.05)) as http:
        url = http.base_url
        stream = await trio.open_tcp_stream(url.host, url.port or 0)
        async with stream:
            await stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"
            )
            answer = bytes(await stream.receive_some())
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_ends_the_generation(stream: bool) -> None:
    first, never = trio.Event(), trio.Event()
    generator = ScriptedGenerator(lambda request: [97, first, never])
    first.set()
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    async with trio.open_nursery() as nursery:
        await nursery.start(telemetry.serve)
        async with client(generator, FrontendOptions(telemetry=telemetry)) as http:
            url = http.base_url
            body = json.dumps(chat_body(stream=stream)).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
            connection = await trio.open_tcp_stream(url.host, url.port or 0)
            await connection.send_all(f"{head}\r\n\r\n".encode() + body)
            if stream:
                assert b"200" in bytes(await connection.receive_some())
            else:
                while not generator.active:
                    await trio.lowlevel.checkpoint()
            await connection.aclose()
            await generator.idle.wait()
            generator.script = say("next")
            answer = await http.post("/v1/chat/completions", json=chat_body())
            assert answer.json()["choices"][0]["message"]["content"] == "next"
        nursery.cancel_scope.cancel()
    events = {event.name: event.attributes for event in sink.events}
    freed = events[names.STAGE_OPENAI_STREAM_LANE_FREED]
    assert (freed["outcome"], freed["frame_kind"]) == ("receiver_dropped", "in_flight")
    assert events[names.STAGE_OPENAI_REQUEST_SUMMARY]["status"] == "completed"


async def test_concurrent_clients_get_their_own_answers() -> None:
    generator = ScriptedGenerator(lambda request: list(request.prompt))
    async with client(generator) as http:
        texts = [f"prompt number {index}" for index in range(8)]
        answers: dict[str, str] = {}

        async def ask(text: str) -> None:
            answer = await http.post("/v1/completions", json=completion_body(list(text.encode())))
            answers[text] = answer.json()["choices"][0]["text"]

        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(ask, text)
    assert answers == {text: text for text in texts}


async def test_keep_alive_after_errors_and_streams() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=http.base_url, limits=limits, timeout=60) as single:
            for _ in range(3):
                assert (await single.get("/nowhere")).status_code == 404
                stream = await single.post("/v1/chat/completions", json=chat_body(stream=True))
                assert frames(stream.text)

"""The terminal chat, against a scripted endpoint."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from skippy.cli.chat import ChatEndpoint, ChatSession, valid_text
from skippy.cli.client import error_text, printable
from skippy.cli.errors import CliError
from skippy.cli.main import main

from .support import run_cli

Handler = Callable[[httpx.Request], httpx.Response]


def events(*pieces: str, done: bool = True) -> bytes:
    chunks = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, *(["[DONE]"] if done else [])]).encode()


class Script:
    """An endpoint that gives prepared answers and keeps the requests."""

    def __init__(self, *answers: bytes | tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        self.bodies.append(json.loads(request.content))
        answer = self.answers.pop(0)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return httpx.Response(status, content=body)


def endpoint(handler: Handler) -> ChatEndpoint:
    return ChatEndpoint(httpx.Client(transport=httpx.MockTransport(handler)), "http://host/v1/")


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    typed = iter(lines)

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def talk(session: ChatSession) -> None:
    while session.turn():
        pass


def test_history_is_kept_and_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(events("Hel", "lo"), events("Paris"), events("Hi"))
    session = ChatSession(endpoint(script), "m", "be kind", {"max_tokens": 5})
    type_lines(monkeypatch, "hello", "", "capital?", "/reset", "hi", "/nonsense", "/exit", "never read")
    talk(session)
    system = {"role": "system", "content": "be kind"}
    assert [body["messages"] for body in script.bodies] == [
        [system, {"role": "user", "content": "hello"}],
        [
            system,
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "capital?"},
        ],
        [system, {"role": "user", "content": "hi"}],
    ]
    assert all(body["stream"] and body["model"] == "m" and body["max_tokens"] == 5 for body in script.bodies)
    out = capsys.readouterr().out
    assert "Hello\nParis\nforgotten\nHi\n" in out
    assert "unknown command /nonsense" in out


def test_an_error_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = json.dumps({"error": {"message": "too long", "param": None}}).encode()
    broken = events("half", done=False) + b'data: {"error": {"message": "stage lost"}}\n\n'
    script = Script((400, refusal), broken, events("cut", done=False), b"data: 7\n\n", events("fine"))
    session = ChatSession(endpoint(script), "m", None, {})
    type_lines(monkeypatch, "one", "two", "three", "four", "five")
    talk(session)
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert errors == [
        "error: too long (HTTP 400)",
        "error: stage lost",
        "error: the endpoint ended the stream before the answer was complete",
        "error: the endpoint sent an event that is no chat chunk: 7",
    ]
    assert [message["content"] for message in session.messages] == ["five", "fine"]


def test_ctrl_c_stops_the_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = endpoint(Script())

    def interrupted(_: dict[str, Any]) -> Iterator[str]:
        yield "some"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "answer", interrupted)
    session = ChatSession(chat, "m", None, {})
    type_lines(monkeypatch, "go on")
    talk(session)
    assert "some [stopped]\n" in capsys.readouterr().out
    assert session.messages[-1] == {"role": "assistant", "content": "some"}


def test_the_first_model_is_asked_for() -> None:
    assert endpoint(Script()).first_model() == "m"


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": []}', b'{"data": [{}]}', b"<html>"])
def test_a_list_of_models_that_is_none(body: bytes) -> None:
    with pytest.raises(CliError, match="the answer is no list of models"):
        endpoint(lambda _: httpx.Response(200, content=body)).first_model()


def test_error_texts() -> None:
    assert error_text(503, b'{"error": {"message": "loading"}}') == "loading (HTTP 503)"
    assert error_text(502, b"bad gateway") == "HTTP 502: bad gateway"
    assert error_text(500, b"") == "HTTP 500: empty answer"
    assert error_text(500, b'{"error": "x"}') == 'HTTP 500: {"error": "x"}'


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\nc\td\x9b\x7f\x00é") == "a[2Jb\nc\tdé"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("é🙂\n", "é🙂\n"),
        ("a\udcc3\udca9b", "aéb"),  # UTF-8 read as ASCII
        ("a\udcffb", "a\ufffdb"),
        ("a\ud800\udcffb", "a??b"),
    ],
)
def test_text_from_anywhere_becomes_valid(text: str, valid: str) -> None:
    assert valid_text(text) == valid


def test_text_that_is_no_unicode_goes_through_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(events("odd \ud83d"), events("fine"))
    session = ChatSession(endpoint(script), "m", None, {})
    type_lines(monkeypatch, "caf\udcc3\udca9", "again \udcff")
    talk(session)
    assert [message["content"] for message in script.bodies[1]["messages"]] == [
        "café",
        "odd ?",
        "again \ufffd",
    ]
    assert capsys.readouterr().err == ""


def test_streams_that_cannot_take_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    shown = io.TextIOWrapper(out, encoding="latin-1")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\xc3\xa9\n"), encoding="ascii"))
    monkeypatch.setattr("sys.stdout", shown)
    script = Script(events("é🙂"))
    client = httpx.Client(transport=httpx.MockTransport(script))
    monkeypatch.setattr(httpx, "Client", lambda **_: client)
    with pytest.raises(SystemExit) as exited:
        main(["chat"])
    shown.flush()
    assert exited.value.code == 0
    assert script.bodies[0]["messages"][0]["content"] == "a\ufffdé"
    assert b"\xe9?\n" in out.getvalue()


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_closed_stream(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f"sys.{name}", None)
        outcome = run_cli(capsys, "chat")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "is closed" in outcome.err


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_temperature_that_is_no_number(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_cli(capsys, "chat", "--temperature", value)
    assert outcome.code == 2
    assert "is not a finite number" in outcome.err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_cli(capsys, "chat", "--url", "http://127.0.0.1:1/v1")
    assert outcome.code == 1
    assert outcome.err.startswith("error: http://127.0.0.1:1/v1: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://[::1", ""])
def test_a_url_that_is_none(capsys: pytest.CaptureFixture[str], url: str) -> None:
    outcome = run_cli(capsys, "chat", "--url", url)
    assert outcome.code == 1
    assert outcome.err.startswith("error: ")

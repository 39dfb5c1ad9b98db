"""``skippy chat``: a terminal chat against a running endpoint."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import click
import httpx

from .client import api_key_option, asking, base_url, error_text, key_headers, printable, url_option
from .errors import CliError

with contextlib.suppress(ImportError):  # line editing and history for input(), where the system has it
    import readline  # noqa: F401

Message = dict[str, str]

_HELP = "/reset forgets the conversation, /exit ends; Ctrl-C stops an answer."


def _check_finite(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):  # what FloatRange lets through, JSON does not
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


@click.command("chat")
@url_option
@api_key_option
@click.option("--model", help="The model; default: the first the endpoint lists.")
@click.option("--system", help="A system message to start with.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Limit of one answer, in tokens.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), callback=_check_finite, help="Sampling temperature."
)
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Chat with a running endpoint."""
    _open_terminal()
    timeout = httpx.Timeout(10, read=None)
    with httpx.Client(timeout=timeout, trust_env=False, headers=key_headers(api_key)) as client:
        endpoint = ChatEndpoint(client, url)
        name = valid_text(model) if model else endpoint.first_model()
        settings = {"max_tokens": max_tokens, "temperature": temperature}
        start = valid_text(system) if system else None
        session = ChatSession(endpoint, name, start, {k: v for k, v in settings.items() if v is not None})
        click.echo(f"{name}. {_HELP}")
        while session.turn():
            pass


class ChatEndpoint:
    """The two calls a chat needs, with errors for users (CliError)."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = f"{base_url(url)}/v1"

    def first_model(self) -> str:
        """The id of the first model the endpoint lists."""
        try:
            with asking(self._url):
                response = self._client.get(f"{self._url}/models")
            if response.status_code != 200:
                raise CliError(error_text(response.status_code, response.content))
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise CliError(f"{self._url}/models: the answer is no list of models") from None

    def answer(self, body: dict[str, Any]) -> Iterator[str]:
        """Stream the pieces of one answer."""
        where = f"{self._url}/chat/completions"
        with asking(self._url), self._client.stream("POST", where, json=body) as response:
            if response.status_code != 200:
                raise CliError(error_text(response.status_code, response.read()))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or not data:
                    continue
                if data == "[DONE]":
                    return
                yield from _pieces(data)
        raise CliError("the endpoint ended the stream before the answer was complete")


def _pieces(data: str) -> Iterator[str]:
    """Text in one event of the stream; an error event raises."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise CliError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield valid_text(text)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CliError(f"the endpoint sent an event that is no chat chunk: {data[:200]}") from None


def _open_terminal() -> None:
    """Make input and output take any text: what cannot be read or shown is replaced, not an error.

    Raises:
        CliError: standard input or output is closed.
    """
    for name, stream, errors in (("input", sys.stdin, "surrogateescape"), ("output", sys.stdout, "replace")):
        if stream is None:
            raise CliError(f"standard {name} is closed; a chat needs it")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def valid_text(text: str) -> str:
    """Text that JSON can carry: bytes that Python smuggled in as lone surrogates (PEP 383) read as UTF-8."""
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # surrogates of another origin
        data = text.encode("utf-8", "replace")
    return data.decode("utf-8", "replace")


class ChatSession:
    """The conversation so far, and one turn at a time."""

    def __init__(
        self, endpoint: ChatEndpoint, model: str, system: str | None, settings: dict[str, Any]
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self._settings = settings
        self.messages: list[Message] = list(self._start)

    def turn(self) -> bool:
        """Ask for a line and answer it; False when the user ends the chat (/exit, or end of input)."""
        try:
            line = valid_text(input("> ")).strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return False
        if not line:
            return True
        if line == "/exit":
            return False
        if line == "/reset":
            self.messages = list(self._start)
            click.echo("forgotten")
        elif line.startswith("/"):
            click.echo(f"unknown command {line.split()[0]}; {_HELP}")
        else:
            self._say(line)
        return True

    def _say(self, text: str) -> None:
        """One question and its answer. A question that got no answer is not remembered."""
        question: Message = {"role": "user", "content": text}
        body = {
            "model": self._model,
            "messages": [*self.messages, question],
            "stream": True,
            **self._settings,
        }
        pieces: list[str] = []
        try:
            for piece in self._endpoint.answer(body):
                pieces.append(piece)
                click.echo(printable(piece), nl=False)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False)
        except CliError as error:
            click.echo(f"\nerror: {error.format_message()}", err=True)
            return
        click.echo()
        if pieces:
            self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]

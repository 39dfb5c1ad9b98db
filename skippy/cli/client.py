"""What commands that are clients of a running endpoint have in common: flags, its errors, its texts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import click
import httpx

from .errors import CliError

API_KEY_VARIABLE = "SKIPPY_API_KEY"

url_option = click.option(
    "--url", default="http://127.0.0.1:9337/v1", show_default=True, help="The endpoint."
)
api_key_option = click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    show_envvar=True,
    metavar="KEY",
    help="A key of the endpoint, where it asks for one.",
)


def key_headers(api_key: str | None) -> dict[str, str]:
    """Headers of requests that show ``api_key``; none without one.

    Raises:
        UsageError: it cannot be sent.
    """
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise click.UsageError(f"the API key (--api-key or {API_KEY_VARIABLE}) must be printable ASCII")
    return {"authorization": f"Bearer {api_key}"}


def base_url(url: str) -> str:
    """The server's own URL, without the ``/v1`` that OpenAI clients want."""
    return url.rstrip("/").removesuffix("/v1")


@contextlib.contextmanager
def asking(url: str) -> Iterator[None]:
    """A block that asks the server at ``url``. What keeps it from an answer is a CliError that says so."""
    try:
        yield
    except httpx.ConnectError as error:
        raise CliError(f"{url}: {error}; is `skippy run` serving there?") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CliError(f"{url}: {error or type(error).__name__}") from None


def error_text(status: int, body: bytes) -> str:
    """The message of an OpenAI error envelope, or the status and the start of the body."""
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace').strip() or 'empty answer'}"


def printable(text: str) -> str:
    """Text without control characters, so that a model cannot steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c <= "\x9f"))

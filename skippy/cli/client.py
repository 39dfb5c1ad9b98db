"""Flags of the commands that are clients of a running endpoint."""

from __future__ import annotations

import click

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

"""``skippy top``: what a running chain is doing, as a table that follows it."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit, urlunsplit

import click
import trio
from rich.console import Console
from rich.live import Live
from trio_websocket import ConnectionClosed, ConnectionRejected, HandshakeError, open_websocket_url

from .client import api_key_option, base_url, error_text, key_headers, url_option
from .errors import CliError
from .top_view import render

CONNECT_SECS: Final = 10.0
SILENCE_SECS: Final = 10.0
"""How long an endpoint may say nothing; it says something each second."""
MAX_PAUSE_SECS: Final = 10.0
MAX_SNAPSHOT_BYTES: Final = 4 * 1024 * 1024

Snapshot = dict[str, Any]
Watch = Callable[[Callable[[Snapshot], object]], Awaitable[object]]


@click.command("top")
@url_option
@api_key_option
@click.option(
    "--once", is_flag=True, help="Print one table and end; so it is where the output is no terminal."
)
@click.option("--json", "as_json", is_flag=True, help="The same as the endpoint's JSON.")
def top(url: str, api_key: str | None, once: bool, as_json: bool) -> None:
    """Show stages, lanes, queue and rates of a running endpoint, once a second; Ctrl-C ends it."""
    console = Console()
    headers = [(name.encode(), value.encode()) for name, value in key_headers(api_key).items()]
    watch = functools.partial(watch_chain, live_url(url), headers)
    if as_json or once or not console.is_terminal:
        snapshot = trio.run(_first, watch)
        if as_json:
            click.echo(json.dumps(snapshot, indent=2))
        else:
            console.print(render(snapshot))
        return
    try:
        trio.run(_follow, watch, console, base_url(url))
    except* KeyboardInterrupt:
        pass  # how it is meant to end


def live_url(url: str) -> str:
    """The WebSocket's URL of an endpoint.

    Raises:
        UsageError: it is no HTTP URL.
    """
    schemes = {"http": "ws", "https": "wss"}
    try:
        parts = urlsplit(base_url(url))
        usable = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise click.UsageError(f"--url {url!r} is no URL of an endpoint; write http://HOST:PORT/v1")
    return urlunsplit((schemes[parts.scheme], parts.netloc, f"{parts.path}/live", "", ""))


async def _first(watch: Watch) -> Snapshot:
    found: list[Snapshot] = []
    with trio.CancelScope() as scope:

        def take(snapshot: Snapshot) -> None:
            found.append(snapshot)
            scope.cancel()

        await watch(take)
    return found[0]


async def _follow(watch: Watch, console: Console, name: str) -> None:
    """Show what comes until cancelled; an endpoint that goes away is asked again.

    Raises:
        CliError: it was not there to begin with, or refuses.
    """
    seen, pause = False, 1.0
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(snapshot: Snapshot) -> None:
            nonlocal seen, pause
            live.update(render(snapshot, name=name), refresh=True)
            seen, pause = True, 1.0

        while True:
            try:
                await watch(show)
            except EndpointGone as gone:
                if not seen:
                    raise
                live.update(render(None, name=name, trouble=gone.format_message()), refresh=True)
            await trio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECS)


class EndpointGone(CliError):
    """It cannot be reached, or has ended the feed; later it may be there again."""


async def watch_chain(
    url: str, headers: list[tuple[bytes, bytes]], show: Callable[[Snapshot], object]
) -> NoReturn:
    """Call ``show`` with what an endpoint tells of its chain, for as long as it does.

    Raises:
        EndpointGone: it does not, or does not any more.
        CliError: it refuses, or is something else.
    """
    try:
        async with open_websocket_url(
            url,
            extra_headers=headers,
            connect_timeout=CONNECT_SECS,
            disconnect_timeout=1.0,
            max_message_size=MAX_SNAPSHOT_BYTES,
        ) as socket:
            while True:
                with trio.fail_after(SILENCE_SECS):
                    message = await socket.get_message()
                show(_parsed(url, message))
    except ConnectionRejected as refused:
        raise CliError(f"{url}: {error_text(refused.status_code, refused.body or b'')}") from None
    except HandshakeError as error:
        cause = error.__cause__ or error
        text = str(cause) or type(cause).__name__
        raise EndpointGone(f"{url}: {text}; is `skippy run` serving there?") from None
    except ConnectionClosed as closed:
        reason = None if closed.reason is None else closed.reason.reason
        raise EndpointGone(f"{url}: {reason or 'the connection has ended'}") from None
    except trio.TooSlowError:
        raise EndpointGone(f"{url}: nothing was said for {SILENCE_SECS:g} s") from None


def _parsed(url: str, message: str | bytes) -> Snapshot:
    try:
        snapshot = json.loads(message)
    except ValueError:
        snapshot = None
    if not isinstance(snapshot, dict) or snapshot.get("object") != "chain.status":
        raise CliError(f"{url}: what was sent is no status of a chain")
    return snapshot

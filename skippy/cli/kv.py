"""``skippy kv``: what a running endpoint remembers of prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click
import httpx

from .client import api_key_option, asking, base_url, error_text, key_headers, printable, url_option
from .errors import CliError

TIMEOUT_SECS = 70.0
"""Above the longest that emptying the caches of a chain may take."""
_COLUMNS = ("stage", "namespace", "tokens", "held in", "state", "used", "refs", "chunks", "alone")

json_option = click.option("--json", "as_json", is_flag=True, help="Print the endpoint's answer as it is.")


@click.group("kv")
def kv() -> None:
    """Look into the prefix cache of a running endpoint, or empty it."""


@kv.command("ls", short_help="List what the stages remember.")
@url_option
@api_key_option
@json_option
def list_entries(url: str, api_key: str | None, as_json: bool) -> None:
    """List what each stage remembers, the entry that was used longest ago first."""
    with _fields(url):
        report = _ask("GET", url, api_key)
        if as_json:
            click.echo(json.dumps(report, indent=2))
        elif not report["enabled"]:
            click.echo("the prefix cache is off")
        else:
            stages = report["stages"]
            rows = [_row(stage, entry) for stage in stages for entry in stage.get("entries", ())]
            for line in table([_COLUMNS, *rows]):
                click.echo(printable(line))
            for stage in stages:
                if left_out := stage.get("entries_left_out"):
                    click.echo(f"stage {stage['stage_index']}: {left_out} entries more, used longer ago")
            _tell_missing(report)


@kv.command("stats", short_help="Show sizes and counts.")
@url_option
@api_key_option
@json_option
def stats(url: str, api_key: str | None, as_json: bool) -> None:
    """Show what each stage holds and has counted, and what the replies of all have said."""
    with _fields(url):
        report = _ask("GET", url, api_key)
        if as_json:
            stages = [{key: stage[key] for key in stage if key != "entries"} for stage in report["stages"]]
            click.echo(json.dumps(report | {"stages": stages}, indent=2))
            return
        if not report["enabled"]:
            click.echo("the prefix cache is off")
            return
        for stage in report["stages"]:
            for name, value in _flat(stage):
                if name not in ("stage_index", "entries"):
                    click.echo(printable(f"stage {stage['stage_index']}: {name}: {value}"))
        for name, value in _flat(report["chain"]):
            click.echo(printable(f"chain: {name}: {value}"))
        _tell_missing(report)


@kv.command("drop", short_help="Have every stage forget.")
@url_option
@api_key_option
@click.option("--all", "everything", is_flag=True, help="Forget everything.")
@click.option(
    "--namespace",
    metavar="DIGITS",
    help="Forget namespaces that begin so, as `kv ls` shows them; `common`: that of requests without keys.",
)
def drop(url: str, api_key: str | None, everything: bool, namespace: str | None) -> None:
    """Have every stage forget what it remembers; requests that run are not disturbed."""
    if everything == (namespace is not None):
        raise click.UsageError("give either --all or --namespace DIGITS")
    with _fields(url):
        answer = _ask("DELETE", url, api_key, {"namespace": "all" if everything else namespace})
        click.echo(f"forgotten on every stage; on stage 0 {answer['dropped']} entries")


def _ask(method: str, url: str, api_key: str | None, query: dict[str, Any] | None = None) -> dict[str, Any]:
    where = base_url(url) + "/kv"
    with (
        asking(where),
        httpx.Client(timeout=TIMEOUT_SECS, trust_env=False, headers=key_headers(api_key)) as client,
    ):
        response = client.request(method, where, params=query)
    if response.status_code != 200:
        raise CliError(error_text(response.status_code, response.content))
    answer = response.json()
    if not isinstance(answer, dict):
        raise TypeError("no object")
    return answer


@contextlib.contextmanager
def _fields(url: str) -> Iterator[None]:
    """Say so where an answer is not what it should be."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CliError(f"{url}: the answer is no report of a prefix cache") from None


def _tell_missing(report: dict[str, Any]) -> None:
    if report["missing"] is not None:
        click.echo(printable(f"stages behind stage 0: {report['missing']}"), err=True)


def _row(stage: dict[str, Any], entry: dict[str, Any]) -> tuple[str, ...]:
    held = "-" if entry["sequence"] is None else f"sequence {entry['sequence']}"
    return (
        str(stage["stage_index"]),
        str(entry["namespace"]),
        str(entry["tokens"]),
        held + (" (in use)" if entry["live"] else ""),
        f"{entry['state_bytes']:,} B" if entry["state_bytes"] else "-",
        str(entry["last_used"]),
        str(entry["refs"]),
        str(entry["chunks"]),
        "yes" if entry["alone"] else "no",
    )


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines with the columns of ``rows`` below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

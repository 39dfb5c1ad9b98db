"""A chain's status on a terminal. Nothing a server sends is taken for markup or steers the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .client import printable
from .errors import CliError

_STYLES: Final = {"decode": "green", "prefill": "blue", "cleaning": "magenta", "connecting": "yellow"}


def render(status: Mapping[str, Any] | None, *, name: str = "", trouble: str | None = None) -> RenderableType:
    """The whole screen.

    Args:
        status: what an endpoint has sent; None while there is nothing.
        name: of the endpoint, for the first line.
        trouble: why there is nothing new.

    Raises:
        CliError: ``status`` is no status of a chain.
    """
    parts: list[RenderableType] = []
    if name:
        parts.append(Text.assemble(("skippy top", "bold"), "  ", printable(name)))
    if trouble is not None:
        parts.append(Text(printable(trouble), style="red"))
    if status is not None:
        try:
            parts += _parts(status)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise CliError("what was sent is no status of a chain") from None
    return Group(*parts)


def _parts(status: Mapping[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if status["unready"] is not None:
        parts.append(Text(_text(status["unready"]), style="red"))
    parts += [_summary(status), _stages(status), _lanes(status["lanes"])]
    if status["last"] is not None:
        parts.append(_last(status["last"]))
    return parts


def _text(value: Any) -> str:
    return printable(str(value))[:200]


def _summary(status: Mapping[str, Any]) -> Table:
    totals = status["totals"]
    prompt, cached = int(totals["prompt_tokens"]), int(totals["cached_tokens"])
    share = f"{100 * cached / prompt:.0f} %" if prompt else "-"
    hits = f"{status['cache_hits']} of {status['cache_lookups']} lookups"
    used = 100 * status["reserved_kv_tokens"] / max(1, status["kv_tokens"])
    return _table(
        ["tokens/s", "running", "queue", "from cache", "KV reserved", "requests", "tokens"],
        [
            [
                f"{status['tokens_per_second']:.1f}",
                f"{status['running']} of {status['concurrency']}",
                f"{status['queue_depth']} of {status['queue_capacity']}",
                f"{share} ({hits})",
                f"{used:.0f} %",
                _text(totals["requests"]),
                _text(totals["generated_tokens"]),
            ]
        ],
    )


def _stages(status: Mapping[str, Any]) -> Table:
    hops = status["hops"] or {}
    rows = []
    for stage in status["stages"]:
        end = "…" if stage["layer_end"] is None else stage["layer_end"]
        notes = []
        for times in status["times"]:
            if times["index"] == stage["index"]:
                notes.append(f"{times['compute_ms']:.1f} ms for {times['tokens']} tokens")
                if times["bytes"]:
                    notes.append(f"hop {times['write_ms'] + times['wait_ms']:.1f} ms")
        if hops.get("compute_stage") == stage["index"]:
            notes.append(f"slowest: {hops['compute_ms']:.1f} ms for {hops['compute_tokens']} tokens")
        if hops.get("edge_bytes") and hops["edge_stage"] == stage["index"]:
            notes.append(
                f"longest hop: {hops['edge_write_ms']:.1f} ms to write, {hops['edge_wait_ms']:.1f} ms waiting"
            )
        rows.append([stage["stage_id"], f"{stage['layer_start']}:{end}", stage["endpoint"], "; ".join(notes)])
    return _table(["stage", "layers", "at", "last prompt"], rows)


def _lanes(lanes: Sequence[Mapping[str, Any]]) -> Table:
    columns = ["lane", "state", "request", "prompt", "cached", "answer", "of", "tokens/s", "seconds"]
    rows = []
    for lane in lanes:
        row = ["-" if lane["id"] is None else lane["id"], lane["state"]]
        if lane["request_id"] is not None:
            row += [
                lane["request_id"],
                lane["prompt_tokens"],
                lane["cached_tokens"],
                lane["generated_tokens"],
            ]
            row += [lane["max_tokens"], f"{lane['tokens_per_second']:.1f}", f"{lane['running_secs']:.1f}"]
        rows.append(row)
    return _table(columns, rows, right=frozenset((0, 3, 4, 5, 6, 7, 8)), styled=1)


def _last(last: Mapping[str, Any]) -> Text:
    tokens = int(last["generated_tokens"])
    text = (
        f"last request: {last['prompt_tokens']} tokens ({last['cached_tokens']} cached), queue "
        f"{last['queue_ms']:.1f} ms, cache {last['restore_ms']:.1f} ms, prefill {last['prefill_ms']:.1f} ms, "
        f"first token {last['first_token_ms']:.1f} ms, answer {last['answer_ms']:.1f} ms for {tokens} tokens"
    )
    if tokens > 1:
        text += f", {last['answer_ms'] / (tokens - 1):.1f} ms each"
    return Text(printable(text), style="dim")


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    right: frozenset[int] = frozenset(),
    styled: int | None = None,
) -> Table:
    table = Table(box=None, header_style="bold dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        cells = [Text(_text(cell)) for cell in row]
        if styled is not None:
            cells[styled].stylize(_STYLES.get(cells[styled].plain, "dim"))
        table.add_row(*cells)
    table.add_row()
    return table

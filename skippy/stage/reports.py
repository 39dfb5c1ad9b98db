"""What stages tell of their prefix caches, and of the last prompt, for people: a JSON object each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from skippy.protocol import MAX_ANNEX_REPORT_BYTES, ReplyAnnex

from .context import StageContext
from .keeping import KvEntry
from .states import StateTier

SHOWN_DIGITS: Final = 16
"""Of a namespace: enough to tell them apart, too few to find out an API key by trying."""
COMMON: Final = "common"
"""How the namespace of requests without keys is called."""


def cache_report(context: StageContext) -> dict[str, Any]:
    """What the prefix cache of a stage holds now and has counted since its start.

    ``entries``: the one used longest ago first, without their tokens; ``entries_left_out``: how many more.
    """
    cache, report = context.cache, {"stage_index": context.stage_index, "enabled": context.cache is not None}
    if cache is None:
        return report
    holds = attrs.asdict(cache.index.stats())
    activations = cache.activations
    return report | {
        "settings": attrs.asdict(cache.settings),
        "counters": holds.pop("counters"),
        "holds": holds,
        "states": None if cache.states is None else _states(cache.states),
        "activations": None if activations is None else attrs.asdict(activations.stats()),
        "entries": [_entry(entry) for entry in cache.index.entries()],
        "entries_left_out": 0,
    }


def _states(states: StateTier) -> dict[str, Any]:
    writer, durable = states.writer, states.durable
    return {
        "memory": attrs.asdict(states.blocks.stats()),
        "files": None if durable is None else attrs.asdict(durable.stats()),
        "writer": {"stored": writer.stored, "dropped": writer.dropped, "failed": writer.failed},
    }


def _entry(entry: KvEntry) -> dict[str, Any]:
    return {
        "namespace": entry.namespace[:SHOWN_DIGITS] or COMMON,
        "tokens": entry.length,
        "sequence": entry.sequence,
        "state_bytes": 0 if entry.state is None else entry.state.size,
        "live": entry.live,
        "refs": entry.refs,
        "last_used": entry.last_used,
        "chunks": len(entry.schedule),
        "alone": entry.alone,
    }


def timing_report(context: StageContext) -> dict[str, Any]:
    """What the last prompt has taken a stage; ``prompt`` is null before the first one."""
    times = context.last_prompt.times
    return {"stage_index": context.stage_index, "prompt": None if times is None else attrs.asdict(times)}


def report_annex(
    context: StageContext,
    below: ReplyAnnex | None,
    make: Callable[[StageContext], dict[str, Any]] = cache_report,
) -> ReplyAnnex | None:
    """What a stage that is asked answers with: its own report, and those of the stages behind it.

    A line each, together no more than an annex takes: stage ``n`` takes at most ``1/n`` of what those behind
    it have left, and leaves out what was used longest ago. Stage 0, which asks, answers itself.
    """
    lines = [] if below is None or below.report is None else [below.report]
    if context.stage_index:
        used = sum(len(line.encode()) + 1 for line in lines)
        lines.insert(0, _fitting(make(context), (MAX_ANNEX_REPORT_BYTES - used) // context.stage_index))
    text = "\n".join(filter(None, lines))
    return ReplyAnnex(report=text) if text else None


def _fitting(report: dict[str, Any], room: int) -> str:
    """The report within so many bytes; nothing where it does not fit without any entry."""
    entries: Sequence[Any] = report.get("entries", ())
    while len(text := json.dumps(report, separators=(",", ":"))) > room:
        if not entries:
            return ""
        entries = entries[len(entries) // 2 + 1 :]
        report = report | {
            "entries": entries,
            "entries_left_out": report["entries_left_out"] + len(report["entries"]) - len(entries),
        }
    return text


def parse_reports(annex: ReplyAnnex | None) -> list[dict[str, Any]]:
    """The reports in an annex, as they were made; what is none is left out."""
    lines = "" if annex is None or annex.report is None else annex.report
    reports = []
    for line in lines.split("\n"):
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(report, dict) and isinstance(report.get("stage_index"), int):
            reports.append(report)
    return reports

"""Mermaid state diagrams of the transition tables, for ``docs/protocol.md``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

from .states import HANDSHAKE, LANE, RETURN, SESSION, UPSTREAM, WINDOW

BEGIN: Final = "<!-- diagrams: printed by `python -m skippy.protocol diagrams`, do not edit -->"
END: Final = "<!-- end of diagrams -->"

Table = Mapping[Any, Mapping[Any, Any]]
_MACHINES: Final[tuple[tuple[str, Table], ...]] = (
    ("Handshake", HANDSHAKE),
    ("Upstream connection", UPSTREAM),
    ("Lane", LANE),
    ("Session", SESSION),
    ("Prediction return", RETURN),
    ("Verify window", WINDOW),
)


def diagram(table: Table) -> str:
    """One machine: an arrow for each pair of states, labelled with the events that take it."""
    states = list(table)
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state.value}" as {state.name}' for state in states if state.value != state.name]
    for state in states:
        arrows: dict[enum.Enum, list[str]] = {}
        for event, target in table[state].items():
            arrows.setdefault(target, []).append(event.value)
        lines += [f"    {state.name} --> {t.name}: {', '.join(events)}" for t, events in arrows.items()]
    return "\n".join(lines)


def all_diagrams() -> str:
    """The text between the two markers of ``docs/protocol.md``, markers included."""
    parts = [BEGIN]
    for name, table in _MACHINES:
        parts += ["", f"### {name}", "", "```mermaid", diagram(table), "```"]
    return "\n".join([*parts, "", END])

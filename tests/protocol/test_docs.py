"""What ``docs/protocol.md`` says about numbers and machines is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skippy.protocol import MessageKind, kinds
from skippy.protocol.__main__ import main
from skippy.protocol.diagrams import BEGIN, END, all_diagrams
from skippy.protocol.vectors import camel_case

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_diagrams_are_the_generated_ones() -> None:
    assert TEXT.count(BEGIN) == 1
    start, end = TEXT.index(BEGIN), TEXT.index(END) + len(END)
    assert TEXT[start:end] == all_diagrams(), "run `python -m skippy.protocol diagrams` and paste it"


def test_diagrams_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagrams"]) == 0
    assert capsys.readouterr().out == all_diagrams() + "\n"


def test_diagrams_name_every_state_and_event_that_is_reachable() -> None:
    text = all_diagrams()
    assert text.count("```mermaid") == 6
    assert "PREFILLING --> DECODING: final prefill, decode, final replay" in text
    assert 'state "suspect" as SUSPECT' in text


def test_constants_table() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_0-9]+)` \| (\d+|0x[0-9a-f]+|-1) \|", TEXT, re.MULTILINE))
    assert len(rows) >= 20
    for name, value in rows.items():
        assert getattr(kinds, name) == int(value, 0), name


def test_kinds_table() -> None:
    rows = re.findall(r"^\| (\d+) \| `([A-Za-z]+)` \|", TEXT, re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(int(k), camel_case(k)) for k in MessageKind}

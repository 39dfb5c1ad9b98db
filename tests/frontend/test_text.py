"""Detokenising and stop strings: how the input is cut must not show in the output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from skippy.frontend.text import Detokeniser, StopMatcher


def cut(data: Sequence[str] | bytes | str, places: list[int]) -> list[bytes | str]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]  # type: ignore[misc]


@settings(deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=10))
def test_detokeniser_does_not_depend_on_cuts(data: bytes, places: list[int]) -> None:
    detokeniser = Detokeniser()
    text = "".join(detokeniser.feed(bytes(piece)) for piece in cut(data, places))  # type: ignore[arg-type]
    assert text + detokeniser.finish() == data.decode("utf-8", "replace")


def test_detokeniser_holds_incomplete_characters() -> None:
    detokeniser = Detokeniser()
    assert [detokeniser.feed(bytes([byte])) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]
    assert detokeniser.feed(b"\xf0\x9f") == ""
    assert detokeniser.finish() == "\ufffd"


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the earliest match, by looking at all of it at once."""
    found = [start for stop in stops if (start := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


_TEXT = st.text("abc", max_size=30)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@settings(deadline=None)
@given(_TEXT, _STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_stop_matcher_does_not_depend_on_cuts(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    output = "".join(matcher.feed(str(piece)) for piece in cut(text, places)) + matcher.finish()
    assert (output, matcher.stopped) == expected(text, stops)


@settings(deadline=None)
@given(_TEXT, _STOPS)
def test_stop_matcher_holds_back_only_what_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for character in text:
        seen += character
        matcher.feed(character)
    if not matcher.stopped:
        held = matcher.finish()
        if held and not matcher.stopped:
            assert any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "out"),
    [
        (["END"], ["xE", "N", "D", "y"], ["x", "", "", ""]),
        (["END"], ["xEN", "x"], ["x", "ENx"]),
        # Both begin at the same place: the shorter one is complete first.
        (["ab", "abc"], ["xab", "c"], ["x", ""]),
        # The longer one begins earlier and may still complete.
        (["bc", "abcd"], ["abc", "d"], ["", ""]),
        (["bc", "abcd"], ["abc", "x"], ["", "a"]),
        ([], ["abc"], ["abc"]),
    ],
)
def test_stop_matcher_cases(stops: list[str], pieces: list[str], out: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.feed(piece) for piece in pieces] == out

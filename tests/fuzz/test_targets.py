"""The fuzz targets inside the test run: bounded, from the corpus, and shown to find what they look for."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fuzz import CORPUS, targets
from fuzz.__main__ import corpus_of, run
from fuzz.make_corpus import write
from fuzz.mutate import mutated
from fuzz.targets import HEADS, TARGETS
from skippy.protocol import Reply, ReplyStats, encode_reply, incremental

NAMES = sorted(TARGETS)
EDITS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 8), st.binary(max_size=8)), max_size=4)


def edited(item: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """``item`` with, at each place, some bytes exchanged for others."""
    for place, length, data in edits:
        place %= len(item) + 1
        item = item[:place] + data + item[place + length :]
    return item


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_parse_or_raise_our_own_error(name: str, data: st.DataObject) -> None:
    seeds = st.builds(edited, st.sampled_from(corpus_of(name)), EDITS)
    TARGETS[name](data.draw(seeds | st.binary(max_size=300)))


@pytest.mark.parametrize("name", NAMES)
def test_a_short_run_of_the_mutator(name: str) -> None:
    assert run(name, 500, seed=1)


def test_every_target_has_a_corpus_and_the_script_writes_it(tmp_path: Path) -> None:
    def files(root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}

    write(tmp_path / "corpus")
    assert files(tmp_path / "corpus") == files(CORPUS)
    assert sorted(path.name for path in CORPUS.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_inputs(name: str) -> None:
    corpus, head = corpus_of(name), HEADS.get(name, 0)
    first, second, other = (
        [mutated(rng, corpus, head) for _ in range(200)] for rng in map(random.Random, (5, 5, 6))
    )
    assert first == second
    assert first != other
    assert len(set(first)) > 150


def broken_need(self: incremental.Intake, count: int) -> incremental.Step[int]:
    """The buffer hands out bytes that have not come."""
    if self.end - self.start < count - 1:
        yield
    offset = self.start
    self.start += count
    return offset


def test_a_fault_in_the_parser_is_found_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(incremental.Intake, "need", broken_need)
    assert not run("replies", 5000, seed=0)
    assert "broke the invariant" in capsys.readouterr().out
    (kept,) = tmp_path.glob("crash-replies-*")
    with pytest.raises((AssertionError, struct.error)):
        targets.replies(kept.read_bytes())
    monkeypatch.undo()
    targets.replies(kept.read_bytes())


def test_an_exception_that_is_not_ours_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def parse(body: bytes) -> None:
        if b"\xff" in body:
            raise UnicodeDecodeError("utf-8", body, 0, 1, "bad")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(targets, "parse_chat", parse)
    assert not run("chat", 5000, seed=0)


def test_a_round_trip_that_changes_a_reply_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_stats(reply: Reply) -> bytes:
        return encode_reply(Reply(reply.kind, reply.predicted, reply.predicted_tokens, reply.window_id))

    monkeypatch.setattr(targets, "encode_reply", without_stats)
    with pytest.raises(AssertionError):
        targets.replies(b"\x00" + encode_reply(Reply.ack(ReplyStats(kv_lookup_hits=1))))

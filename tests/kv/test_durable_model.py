"""The durable store against a model: a dictionary in order of use, within a budget, that restarts survive."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skippy.kv.durable import DurableStore, StateFile
from skippy.kv.statefile import FIXED_BYTES

IDENTITY = bytes(range(32))
Key = tuple[str, tuple[int, ...]]
KEYS = st.tuples(st.sampled_from(["", "ab"]), st.tuples(st.integers(0, 3)))
STATES = st.integers(1, 300).map(lambda size: random.Random(size).randbytes(size))


class Model(RuleBasedStateMachine):
    BUDGET = 4 * (FIXED_BYTES + 200)

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.files: OrderedDict[Key, tuple[StateFile, bytes]] = OrderedDict()
        self.store = self.opened()

    def opened(self) -> DurableStore:
        return DurableStore(self.folder, IDENTITY, self.BUDGET, reserve_bytes=0)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(key=KEYS, state=STATES)
    def write(self, key: Key, state: bytes) -> None:
        namespace, tokens = key
        written = self.store.write(namespace, tokens, [state[:7], state[7:]])
        assert written.file is not None
        if key in self.files and self.files[key][1] == state:
            assert written.file.name == self.files[key][0].name
            assert written.gone == ()
            self.files.move_to_end(key)
            return
        size = written.file.file_bytes
        assert size == FIXED_BYTES + len(namespace) + 4 + len(state)
        gone = []
        while sum(file.file_bytes for file, _ in self.files.values()) + size > self.BUDGET:
            gone.append(self.files.popitem(last=False)[1][0])
        if key in self.files:
            gone.append(self.files.pop(key)[0])
        assert [file.name for file in written.gone] == [file.name for file in gone]
        self.files[key] = (written.file, state)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.files)))
        file, state = self.files[key]
        assert self.store.read(file) == state
        self.files.move_to_end(key)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        file, _ = self.files.pop(data.draw(st.sampled_from(list(self.files))))
        self.store.remove(file)
        assert self.store.read(file) is None

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opened()
        found = {(head.namespace, tuple(head.tokens)): file for file, head in self.store.take_found()}
        assert {key: file.name for key, file in found.items()} == {
            key: file.name for key, (file, _) in self.files.items()
        }
        self.files = OrderedDict((key, (file, self.files[key][1])) for key, file in found.items())

    @invariant()
    def counted(self) -> None:
        stats = self.store.stats()
        assert stats.bytes == sum(file.file_bytes for file, _ in self.files.values()) <= self.BUDGET
        on_disk = {path.name for path in (self.store.path / "states").iterdir()}
        assert on_disk == {file.name for file, _ in self.files.values()}
        assert (stats.files, stats.corrupt, stats.unreadable) == (len(self.files), 0, 0)


TestModel = Model.TestCase
TestModel.settings = hypothesis.settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_threads_that_read_write_and_remove_at_once_get_whole_states_or_nothing(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, IDENTITY, 20_000, reserve_bytes=0)
    states = {(n,): random.Random(n).randbytes(1500) for n in range(20)}
    known: dict[tuple[int, ...], StateFile] = {}
    wrong: list[object] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            tokens = (dice.randrange(20),)
            what, file = dice.random(), known.get(tokens)
            if file is None or what < 0.4:
                written = store.write("", tokens, [states[tokens]]).file
                if written is not None:
                    known[tokens] = written
            elif what < 0.9:
                state = store.read(file)
                if state is not None and state != states[tokens]:
                    wrong.append(tokens)
            else:
                store.remove(file)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stats = store.stats()
    assert not wrong
    assert stats.corrupt == stats.failed == 0
    assert stats.hits > 0
    paths = list((store.path / "states").iterdir())
    assert stats.bytes == sum(path.stat().st_size for path in paths) <= 20_000
    store.close()


def test_memory_stays_flat_however_much_is_written(tmp_path: Path) -> None:
    """The index knows names and sizes; tokens and states are the caller's."""
    store = DurableStore(tmp_path, IDENTITY, 200_000, reserve_bytes=0)
    tokens = list(range(2000))

    def write(count: int, first: int) -> int:
        for n in range(first, first + count):
            store.write("", [*tokens, n], [bytes(3000)])
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = write(30, 0)
        assert write(100, 30) - before < 20_000
    finally:
        tracemalloc.stop()
    assert store.stats().evicted > 100
    store.close()

"""States on disk: what survives, what is refused, and that all trouble is a miss."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skippy.config import ConfigError
from skippy.kv.blocks import BLOCK_BYTES
from skippy.kv.durable import QUARANTINED_FILES, DurableStore, StateFile, Written
from skippy.kv.folders import PrivateFolder
from skippy.kv.statefile import FIXED_BYTES

IDENTITY = bytes(range(32))
OTHER = bytes(32)
STATE = bytes(range(256)) * 4
HEAD = FIXED_BYTES + 2 + 4 * (2 + 3)


def open_store(folder: Path, max_bytes: int = 100_000, identity: bytes = IDENTITY) -> DurableStore:
    return DurableStore(folder, identity, max_bytes, reserve_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DurableStore]:
    made = open_store(tmp_path)
    yield made
    made.close()


def write(store: DurableStore, tokens: tuple[int, ...] = (1, 2, 3), state: bytes = STATE) -> StateFile:
    schedule = (2, 1) if len(tokens) == 3 else ()
    written = store.write("ab", tokens, [state[:100], memoryview(state)[100:]], schedule=schedule, alone=True)
    assert written.file is not None
    return written.file


def names(store: DurableStore, folder: str = "states") -> list[str]:
    return sorted(os.listdir(store.path / folder))


def test_a_state_comes_back(store: DurableStore) -> None:
    file = write(store)
    state = store.read(file)
    assert state == STATE
    assert state is not None
    assert state.readonly
    assert names(store) == [file.name]
    assert file.file_bytes == (store.path / "states" / file.name).stat().st_size == HEAD + len(STATE)
    stats = store.stats()
    assert (stats.files, stats.bytes, stats.written, stats.hits) == (1, file.file_bytes, 1, 1)


def test_it_survives_the_process_with_all_that_was_said(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    assert first.take_found() == []
    one, two = write(first), write(first, (-5, 2**31 - 1), b"other")
    assert first.read(one) == STATE  # used last
    first.close()
    second = open_store(tmp_path)
    (older, older_head), (younger, head) = second.take_found()
    assert second.take_found() == []
    assert (older.name, younger.name) == (two.name, one.name)
    assert (head.namespace, list(head.tokens), head.schedule, head.alone) == ("ab", [1, 2, 3], (2, 1), True)
    assert list(older_head.tokens) == [-5, 2**31 - 1]
    assert second.read(younger) == STATE
    assert second.read(older) == b"other"
    assert second.stats().bytes == one.file_bytes + two.file_bytes
    second.close()


def test_another_state_of_the_same_tokens_takes_its_place(store: DurableStore) -> None:
    one = write(store)
    assert write(store).name == one.name  # the same once more
    written = store.write("ab", (1, 2, 3), [b"another"])
    assert written.gone == (one,)
    assert written.file is not None
    assert names(store) == [written.file.name]
    assert store.read(one) is None
    assert store.stats().evicted == 0


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    size = HEAD + len(STATE)
    store = open_store(tmp_path, 3 * size)
    files = [write(store, (1, 2, n)) for n in range(3)]
    assert store.read(files[0]) == STATE
    written = store.write("ab", (1, 2, 9), [STATE], schedule=(3, 4))
    assert written.gone == (files[1],)
    assert store.read(files[1]) is None
    assert store.stats().bytes == 3 * size
    assert store.write("ab", (7,), [bytes(3 * size)]).file is None
    assert (store.stats().too_large, store.stats().evicted, store.stats().files) == (1, 1, 3)
    store.close()
    smaller = open_store(tmp_path, size)
    assert [list(head.tokens) for _, head in smaller.take_found()] == [[1, 2, 9]]
    assert len(names(smaller)) == 1
    smaller.close()


def test_what_is_removed_is_gone(store: DurableStore) -> None:
    one, two = write(store), write(store, (4,), b"x")
    store.remove(one)
    store.remove(one)
    assert store.read(one) is None
    assert names(store) == [two.name]
    store.clear()
    assert names(store) == []
    assert store.stats().bytes == store.stats().files == 0


def test_a_changed_identity_is_never_read(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    file = write(first)
    first.close()
    other = open_store(tmp_path, identity=OTHER)
    assert other.take_found() == []
    assert other.read(file) is None
    # Even if somebody puts the file there, or the identities begin alike.
    (first.path / "states" / file.name).rename(other.path / "states" / file.name)
    other.close()
    other = open_store(tmp_path, identity=OTHER)
    assert other.take_found() == []
    assert other.stats().corrupt == 1
    assert names(other, "quarantine") == [file.name]
    other.close()


@pytest.mark.parametrize("place", [*range(0, HEAD, 3), HEAD, HEAD + 500, HEAD + len(STATE) - 1])
@pytest.mark.parametrize("found", ["while open", "at the start"])
def test_a_damaged_file_is_a_miss_and_goes_to_quarantine(tmp_path: Path, place: int, found: str) -> None:
    store = open_store(tmp_path)
    file, whole = write(store), write(store, (4,), b"whole")
    path = store.path / "states" / file.name
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(data)
    if found == "at the start":
        store.close()
        store = open_store(tmp_path)
        files = {tuple(head.tokens): file for file, head in store.take_found()}
        # A state is verified when it is read, a head before.
        assert ((1, 2, 3) in files) == (place >= HEAD)
        file, whole = files.get((1, 2, 3), file), files[4,]
    assert store.read(file) is None
    assert store.read(file) is None
    assert store.read(whole) == b"whole"
    assert names(store) == [whole.name]
    assert names(store, "quarantine") == [file.name]
    stats = store.stats()
    assert (stats.corrupt, stats.misses, stats.files, stats.bytes) == (1, 2, 1, whole.file_bytes)
    assert write(store).name == file.name  # and can be kept again
    assert store.read(file) == STATE
    store.close()


@pytest.mark.parametrize(
    "size", [0, 7, FIXED_BYTES - 1, FIXED_BYTES, HEAD - 1, HEAD, HEAD + 1, HEAD + len(STATE) - 1]
)
@pytest.mark.parametrize("found", ["while open", "at the start"])
def test_a_truncated_file_is_a_miss(tmp_path: Path, size: int, found: str) -> None:
    store = open_store(tmp_path)
    file = write(store)
    os.truncate(store.path / "states" / file.name, size)
    if found == "at the start":
        store.close()
        store = open_store(tmp_path)
        assert store.take_found() == []
    assert store.read(file) is None
    assert names(store, "quarantine") == [file.name]
    assert store.stats().corrupt == 1
    store.close()


def test_bytes_at_the_end_are_damage(store: DurableStore) -> None:
    file = write(store)
    with open(store.path / "states" / file.name, "ab") as stream:
        stream.write(b"x")
    assert store.read(file) is None
    assert store.stats().corrupt == 1


def test_quarantine_is_bounded(store: DurableStore) -> None:
    for n in range(QUARANTINED_FILES + 3):
        file = write(store, (n,))
        os.truncate(store.path / "states" / file.name, 3)
        assert store.read(file) is None
    assert len(names(store, "quarantine")) == QUARANTINED_FILES
    assert file.name in names(store, "quarantine")
    store.clear()
    assert names(store, "quarantine") == []


def test_what_cannot_be_removed_keeps_nothing_else_in_quarantine(store: DurableStore) -> None:
    """Somebody has put a folder there, which is older than all."""
    (store.path / "quarantine" / "notes").mkdir()
    (store.path / "quarantine" / "notes" / "mine").touch()
    for n in range(2 * QUARANTINED_FILES):
        os.truncate(store.path / "states" / write(store, (n,)).name, 3)
    store.close()
    reopened = open_store(store.path.parent)
    assert reopened.stats().corrupt == 2 * QUARANTINED_FILES
    assert len(names(reopened, "quarantine")) == QUARANTINED_FILES + 1
    reopened.clear()
    assert names(reopened, "quarantine") == ["notes"]
    reopened.close()


def test_no_symbolic_link_is_followed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    file, second = write(store), write(store, (4,), b"second")
    for kept in (file, second):
        path = store.path / "states" / kept.name
        path.rename(tmp_path / kept.name)
        path.symlink_to(tmp_path / kept.name)
    assert store.read(file) is None
    store.close()
    store = open_store(tmp_path / "kv")
    assert store.take_found() == []
    store.close()
    for place in (store.path / "states", store.path, tmp_path / "kv"):
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=f"{place}: is a symbolic link, must be a folder itself"):
            open_store(tmp_path / "kv")
        place.unlink()
        (tmp_path / "elsewhere").rename(place)
    open_store(tmp_path / "kv").close()


def test_something_that_is_no_file_is_a_miss_and_waits_for_nobody(store: DurableStore) -> None:
    file, folder = write(store), write(store, (4,), b"x")
    for kept in (file, folder):
        (store.path / "states" / kept.name).unlink()
    os.mkfifo(store.path / "states" / file.name)
    (store.path / "states" / folder.name).mkdir()
    assert store.read(file) is store.read(folder) is None
    assert names(store) == [], "their names are free again"
    assert sorted(names(store, "quarantine")) == sorted([file.name, folder.name])
    assert store.read(write(store)) == STATE


@pytest.mark.parametrize("what", ["folder", "link", "pipe"])
def test_room_is_made_of_whatever_has_the_name_of_a_file(tmp_path: Path, what: str) -> None:
    store = open_store(tmp_path, 2 * (FIXED_BYTES + 2 + 4 + len(STATE)))
    first, second = write(store, (1,)), write(store, (2,))
    path = store.path / "states" / first.name
    path.unlink()
    if what == "folder":
        path.mkdir()
        (path / "inside").touch()
    elif what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    third = write(store, (3,))
    assert store.stats().evicted == 1
    assert sorted(names(store)) == sorted([second.name, third.name])
    assert store.read(write(store, (1,))) == STATE
    store.close()


def test_files_that_cannot_be_read_take_no_room_that_nobody_counts(
    store: DurableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the index, so not of the budget: they go, and what can be told of them is in quarantine."""
    files = [write(store, (n,)) for n in range(10)]

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(PrivateFolder, "open_file", fail)
        assert [store.read(file) for file in files[:8]] == [None] * 8
    assert sorted(names(store)) == sorted(file.name for file in files[8:])
    assert len(names(store, "quarantine")) == QUARANTINED_FILES
    stats = store.stats()
    assert (stats.unreadable, stats.misses, stats.files) == (8, 8, 2)
    assert stats.bytes == sum(path.stat().st_size for path in (store.path / "states").iterdir())


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_the_log_says_once_that_files_are_gone_or_damaged(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for found in ("while open", "at the start"):
        caplog.clear()
        store = open_store(tmp_path)
        files = [write(store, (n,)) for n in range(30)]
        for file in files:
            path = store.path / "states" / file.name
            path.unlink() if damage == "removed" else os.truncate(path, 3)
        if found == "at the start":
            store.close()
            store = open_store(tmp_path)
        else:
            assert {store.read(file) for file in files} == {None}
        store.close()
        assert len(caplog.records) == (0 if (damage, found) == ("removed", "at the start") else 1)


def test_a_missing_file_is_a_miss(store: DurableStore) -> None:
    file = write(store)
    (store.path / "states" / file.name).unlink()
    assert store.read(file) is None
    assert (store.stats().unreadable, store.stats().misses, store.stats().files) == (1, 1, 0)


@pytest.mark.parametrize("operation", ["open_file", "create_file", "move", "sync"])
def test_a_failing_disk_is_no_exception(
    store: DurableStore, operation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(store)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PrivateFolder, operation, fail)
    if operation == "open_file":
        assert store.read(file) is None
        assert store.stats().unreadable == 1
        assert "a kept state cannot be read" in caplog.text
        return
    for n in range(3):
        assert store.write("", (n,), [b"x"]).file is None
    assert store.stats().failed == 3
    assert caplog.text.count("states are not written to disk") == 1
    assert "No space left on device" in caplog.text
    assert names(store) == [file.name]
    assert store.read(file) == STATE
    monkeypatch.undo()
    assert store.write("", (0,), [b"x"]).file is not None


def test_the_reserve_is_left_to_others(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, IDENTITY, 1000, reserve_bytes=2**62)
    assert store.write("", (1,), [b"x"]).file is None
    assert store.stats().no_space == 1
    store.close()


def test_a_full_disk_leaves_no_part_of_a_file(store: DurableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PrivateFolder.create_file

    def on_full_disk(self: PrivateFolder, name: str) -> int:
        os.close(real(self, name))
        return os.open("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(PrivateFolder, "create_file", on_full_disk)
    assert store.write("", (1,), [bytes(1_000_000 // 20)]).file is None
    assert store.stats().failed == 1
    assert names(store) == []


def test_one_process_has_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    program = f"""
        from skippy.kv.durable import DurableStore
        try:
            DurableStore({str(tmp_path)!r}, bytes(range(32)), 1000)
        except ValueError as error:
            print(error)
        else:
            print("opened")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]

    def run() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert run() == (
        f"{store.path}: is in use by process {os.getpid()}; two processes that run the same stage cannot "
        "share it, so name another directory for one of them"
    )
    with pytest.raises(ConfigError, match="is in use by process"):
        open_store(tmp_path)
    open_store(tmp_path, identity=OTHER).close()  # another stage's folder is its own
    store.close()
    assert run() == "opened"


def test_a_process_that_dies_before_the_rename_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
        import os
        from skippy.kv.durable import DurableStore
        from skippy.kv.folders import PrivateFolder
        store = DurableStore({str(tmp_path)!r}, bytes(range(32)), 10_000, reserve_bytes=0)
        store.write("", (1,), [b"whole"])
        PrivateFolder.move = lambda *_: os._exit(9)
        store.write("", (2,), [b"half"])
    """
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(program)])
    assert died.returncode == 9
    store_path = tmp_path / IDENTITY.hex()[:32] / "states"
    assert len(os.listdir(store_path)) == 2
    store = open_store(tmp_path)  # its lock is gone, too
    ((file, head),) = store.take_found()
    assert list(head.tokens) == [1]
    assert names(store) == [file.name]
    assert store.read(file) == b"whole"
    store.close()


def test_all_of_it_is_private(store: DurableStore) -> None:
    file = write(store)
    for path in (store.path, store.path / "states", store.path / "quarantine"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in (f"states/{file.name}", "owner.lock"):
        assert stat.S_IMODE((store.path / name).stat().st_mode) == 0o600


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=f"{blocked}: is not a folder"):
        open_store(blocked)
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        open_store(blocked / "below")
    open_store(tmp_path).close()
    root = tmp_path / IDENTITY.hex()[:32]
    root.chmod(0o750)
    with pytest.raises(ConfigError, match=f"{root}: has mode 0750, must be 0700"):
        open_store(tmp_path)
    root.chmod(0o700)
    lock = root / "owner.lock"
    lock.unlink()
    lock.symlink_to(blocked)
    with pytest.raises(ConfigError, match=f"{lock}: cannot be opened"):
        open_store(tmp_path)
    lock.unlink()
    open_store(tmp_path).close()


def test_a_closed_store_misses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    file = write(store)
    store.close()
    store.close()
    assert store.read(file) is None
    assert store.write("", (1,), [b"x"]).file is None
    store.remove(file)
    store.clear()
    assert names(store) == [file.name]


def test_closing_breaks_a_write_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, 100 * BLOCK_BYTES)
    real = PrivateFolder.create_file
    closer = threading.Thread(target=store.close)

    def create(self: PrivateFolder, name: str) -> int:
        closer.start()
        assert store._ending.wait(20)
        return real(self, name)

    monkeypatch.setattr(PrivateFolder, "create_file", create)
    assert store.write("", (1,), [bytes(5 * BLOCK_BYTES)]) == Written(None)
    closer.join(20)
    assert names(store) == []
    assert caplog.text == ""


def test_folders_that_nobody_used_for_a_month_are_removed(tmp_path: Path) -> None:
    old, used, young = (bytes([n]) * 32 for n in range(3))
    for identity in (old, young):
        store = open_store(tmp_path, identity=identity)
        write(store)
        os.truncate(store.path / "states" / write(store, (4,)).name, 1)
        store.close()
    in_use = open_store(tmp_path, identity=used)
    month = 30 * 24 * 3600
    for identity, age in ((old, month + 60), (used, month + 60), (young, month - 60)):
        lock = tmp_path / identity.hex()[:32] / "owner.lock"
        os.utime(lock, (time.time() - age,) * 2)
    others = ["notes", "0" * 31, "f" * 33, "e" * 32]
    for name in others:
        (tmp_path / name).mkdir()
    open_store(tmp_path).close()
    left = [IDENTITY.hex()[:32], used.hex()[:32], young.hex()[:32], *others]
    assert sorted(os.listdir(tmp_path)) == sorted(left)
    in_use.close()


def test_of_an_abandoned_folder_all_goes_that_can(tmp_path: Path) -> None:
    store = open_store(tmp_path, identity=OTHER)
    for n in range(5):
        write(store, (n,))
    notes = store.path / "states" / "notes"
    notes.mkdir()
    (notes / "mine").touch()
    store.close()
    os.utime(store.path / "owner.lock", (0, 0))
    open_store(tmp_path).close()
    assert names(store) == ["notes"]

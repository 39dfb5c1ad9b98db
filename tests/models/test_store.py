"""What is half-written is somebody's, or goes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skippy.models.store import unfinished

PROGRAM = """
import sys
from pathlib import Path
from skippy.models.store import unfinished
with unfinished(Path(sys.argv[1]), "p-", ".tmp", folder=sys.argv[2] == "folder") as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_left_of_a_killed_process_goes(tmp_path: Path, folder: bool) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "folder" if folder else "file"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        if folder:
            (theirs / "inner").mkdir()
            (theirs / "inner/file").write_bytes(b"half")
        with unfinished(tmp_path, "p-", ".tmp", folder=folder) as mine:
            assert theirs.exists(), "somebody writes it"
            assert mine != theirs
        assert not mine.exists()
        child.kill()
    assert theirs.exists()
    with unfinished(tmp_path, "p-", ".tmp", folder=folder) as mine:
        assert list(tmp_path.iterdir()) == [mine]
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_it_stays(tmp_path: Path) -> None:
    names = {"p-0a1b2c3d", "p-0a1b2c3d.tmp.gz", "p-0a1b2c3.tmp", "p-0A1B2C3D.tmp", "q-0a1b2c3d.tmp", "link"}
    for name in names:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "p-00000000.tmp").mkdir()
    os.mkfifo(tmp_path / "p-00000001.tmp")
    (tmp_path / "p-00000002.tmp").symlink_to("link")
    before = set(tmp_path.iterdir())
    with unfinished(tmp_path, "p-", ".tmp"):
        pass
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("folder", [False, True])
def test_one_that_is_taken_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    taken: list[Path] = []
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir() if folder else taken[0].unlink()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with unfinished(tmp_path, "p-", folder=folder) as path:
        assert list(tmp_path.iterdir()) == [path]
        assert [path] != taken


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError("no locks")

    (tmp_path / "p-0a1b2c3d").write_bytes(b"whose?")
    monkeypatch.setattr(fcntl, "flock", none)
    with unfinished(tmp_path, "p-") as path:
        path.write_bytes(b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["p-0a1b2c3d"]

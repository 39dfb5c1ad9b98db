"""The slice cache: written once, reused, repaired, shared between processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skippy.models import (
    GGUFError,
    GGUFHeader,
    LayerRangeError,
    SliceWriteError,
    UnsupportedArchitectureError,
    default_cache_dir,
    ensure_slice,
    file_sha256,
    weights_sha256,
)
from tests.support.tiny_models import write_tiny


class Stages(list[str]):
    """A progress callback that remembers which stages it saw, in order."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        if stage not in self:
            self.append(stage)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_written_once_then_reused(tied: Path, tmp_path: Path) -> None:
    first, second = Stages(), Stages()
    info = ensure_slice(tied, 1, 3, cache_dir=tmp_path, progress=first)
    written = info.path.stat()
    assert first == ["hash", "write"]
    assert info.path.is_relative_to(tmp_path)
    assert ensure_slice(tied, 1, 3, cache_dir=tmp_path, progress=second) == info
    assert second == []
    assert info.path.stat().st_mtime_ns == written.st_mtime_ns
    another = Stages()
    assert ensure_slice(tied, 3, 6, cache_dir=tmp_path, progress=another).path != info.path
    assert another == ["write"]  # the hash is remembered


def test_the_key_is_the_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model = write_tiny(tmp_path / "m.gguf", layers=3)
    info = ensure_slice(model, 0, 1, cache_dir=cache)
    twin = tmp_path / "twin.gguf"
    twin.write_bytes(model.read_bytes())
    stages = Stages()
    assert ensure_slice(twin, 0, 1, cache_dir=cache, progress=stages).path == info.path
    assert stages == ["hash"]
    write_tiny(model, layers=3, seed=1)
    assert ensure_slice(model, 0, 1, cache_dir=cache).path != info.path


def test_whole_models_and_ready_slices_are_used_in_place(tied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert ensure_slice(tied, 0, 6, cache_dir=cache).path == tied
    other = write_tiny(tmp_path / "m.gguf", "gemma4", layers=2)
    assert ensure_slice(other, 0, 2, cache_dir=cache).path == other
    assert not cache.exists()
    info = ensure_slice(tied, 2, 4, cache_dir=cache)
    assert ensure_slice(info.path, 2, 4, cache_dir=tmp_path / "unused") == info
    assert not (tmp_path / "unused").exists()
    with pytest.raises(LayerRangeError, match="itself a slice"):
        ensure_slice(info.path, 2, 3, cache_dir=cache)


def test_the_weights_of_a_whole_model_are_hashed_once(tied: Path, tmp_path: Path) -> None:
    part = ensure_slice(tied, 1, 3, cache_dir=tmp_path / "one")
    whole = ensure_slice(tied, 0, 6)
    first, second = Stages(), Stages()
    assert weights_sha256(whole, cache_dir=tmp_path / "two", progress=first) == file_sha256(tied)
    assert weights_sha256(whole, cache_dir=tmp_path / "two", progress=second) == file_sha256(tied)
    assert weights_sha256(part, cache_dir=tmp_path / "none") == file_sha256(tied)
    assert (first, second) == (["hash"], [])
    assert not (tmp_path / "none").exists()


def test_refusals_come_before_any_work(tied: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "m.gguf", "gemma4", layers=2)
    cache, stages = tmp_path / "cache", Stages()
    with pytest.raises(UnsupportedArchitectureError, match="gemma4"):
        ensure_slice(other, 0, 1, cache_dir=cache, progress=stages)
    with pytest.raises(LayerRangeError, match="6 layers"):
        ensure_slice(tied, 4, 9, cache_dir=cache, progress=stages)
    with pytest.raises(GGUFError, match="no such file"):
        ensure_slice(tmp_path / "nothing", 0, 1, cache_dir=cache, progress=stages)
    assert stages == []
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["truncated", "magic", "empty", "another slice"])
def test_a_damaged_entry_is_written_again(tied: Path, tmp_path: Path, damage: str) -> None:
    info = ensure_slice(tied, 1, 3, cache_dir=tmp_path)
    good = info.path.read_bytes()
    if damage == "truncated":
        os.truncate(info.path, len(good) - 4096)
    elif damage == "another slice":
        info.path.write_bytes(ensure_slice(tied, 3, 5, cache_dir=tmp_path).path.read_bytes())
    else:
        info.path.write_bytes(b"" if damage == "empty" else b"X" + good[1:])
    assert ensure_slice(tied, 1, 3, cache_dir=tmp_path) == info
    assert info.path.read_bytes() == good


def test_a_damaged_hash_is_taken_again(tied: Path, tmp_path: Path) -> None:
    info = ensure_slice(tied, 1, 3, cache_dir=tmp_path)
    [memo] = [path for path in (tmp_path / "hashes").iterdir() if path.suffix != ".lock"]
    memo.write_bytes(b"\xff nonsense")
    stages = Stages()
    assert ensure_slice(tied, 1, 3, cache_dir=tmp_path, progress=stages) == info
    assert stages == ["hash"]


def test_leftovers_of_a_killed_process_go_away(tied: Path, tmp_path: Path) -> None:
    info = ensure_slice(tied, 1, 3, cache_dir=tmp_path)
    info.path.unlink()
    leftover = info.path.with_name(f".{info.path.name}.0a1b2c3d.tmp")
    leftover.write_bytes(b"half")
    ensure_slice(tied, 1, 3, cache_dir=tmp_path)
    assert not leftover.exists()


def test_failures_are_clear_and_leave_nothing(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(SliceWriteError, match="cannot be written: Not a directory"):
        ensure_slice(tied, 1, 3, cache_dir=blocked)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", full)
        with pytest.raises(SliceWriteError, match="No space left .*; SKIPPY_CACHE names another folder"):
            ensure_slice(tied, 1, 3, cache_dir=cache)
    assert files(cache / "slices") == []
    ensure_slice(tied, 1, 3, cache_dir=cache)

    def denied(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(SliceWriteError, match="Permission denied"):
        ensure_slice(tied, 1, 3, cache_dir=tmp_path / "denied")
    assert ensure_slice(tied, 1, 3, cache_dir=cache).layer_start == 1  # a full cache needs no write access


def test_two_processes_write_it_once(tied: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from skippy.models import ensure_slice\n"
        "seen = []\n"
        "def progress(stage, done, total):\n"
        "    if stage not in seen:\n"
        "        seen.append(stage)\n"
        "        print(stage, flush=True)\n"
        "print(ensure_slice(sys.argv[1], 1, 4, cache_dir=sys.argv[2], progress=progress).path)\n"
    )
    others: list[subprocess.Popen[str]] = []

    def start_another(stage: str, done: int, total: int) -> None:
        if stage != "write" or others:
            return
        others.append(
            subprocess.Popen(
                [sys.executable, "-c", program, tied, tmp_path], stdout=subprocess.PIPE, text=True
            )
        )
        assert others[0].stdout is not None
        assert others[0].stdout.readline() == "wait\n"  # it found us writing

    try:
        info = ensure_slice(tied, 1, 4, cache_dir=tmp_path, progress=start_another)
        output, _ = others[0].communicate(timeout=60)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert others[0].returncode == 0
    assert output == f"{info.path}\n"
    assert files(tmp_path / "slices") == [info.path.name]
    assert GGUFHeader.read(info.path).count("llama.block_count") == 4


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "here"))
    assert default_cache_dir() == tmp_path / "here"
    monkeypatch.delenv("SKIPPY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir().name == "skippy"
    if sys.platform == "linux":
        assert default_cache_dir() == tmp_path / "xdg" / "skippy"

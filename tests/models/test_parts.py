"""A model in several GGUF files is one model: read, cut and identified so; what does not fit is named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from skippy.models import (
    GGUFError,
    GGUFHeader,
    SliceInfo,
    ensure_slice,
    inspect_model,
    read_gguf,
    weights_sha256,
)
from tests.support.splitting import split_model
from tests.support.tiny_models import write_tiny


@pytest.fixture
def parts(tied: Path, tmp_path: Path) -> list[Path]:
    folder = tmp_path / "parts"
    folder.mkdir()
    return split_model(tied, folder)


def digest(parts: list[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(p.read_bytes()).digest() for p in parts)).hexdigest()


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_file_stands_for_all(tied: Path, parts: list[Path], given: int) -> None:
    whole, header = GGUFHeader.read(tied), read_gguf(parts[given])
    assert header.path == parts[0]
    assert [file.path for file in header.files] == parts
    assert list(header.tensors) == list(whole.tensors)
    for name, tensor in header.tensors.items():
        with tensor.file.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.nbytes)
        at = whole.tensors[name].offset
        assert data == tied.read_bytes()[at : at + tensor.nbytes]
    assert list(header.metadata) == list(whole.metadata)  # nothing of how it is split
    assert header.file_size == sum(part.stat().st_size for part in parts)


def test_inspected_as_one(tied: Path, parts: list[Path]) -> None:
    whole, summary = inspect_model(tied), inspect_model(parts[2])
    assert summary.parameters == whole.parameters
    assert summary.bytes_per_layer == whole.bytes_per_layer
    assert (summary.slice.layer_count, summary.slice.path) == (6, parts[0])


def test_a_slice_holds_the_same_bytes(tied: Path, parts: list[Path], tmp_path: Path) -> None:
    for start, end in ((0, 2), (2, 4), (4, 6)):
        mine = ensure_slice(parts[1], start, end, cache_dir=tmp_path / "a")
        other = ensure_slice(tied, start, end, cache_dir=tmp_path / "b")
        assert mine.source_sha256 == digest(parts)
        one, two = GGUFHeader.read(mine.path), GGUFHeader.read(other.path)
        assert one.path.read_bytes()[one.data_offset :] == two.path.read_bytes()[two.data_offset :]
        assert list(one.tensors) == list(two.tensors)
    assert weights_sha256(SliceInfo.from_file(parts[0]), cache_dir=tmp_path / "a") == digest(parts)


def test_the_whole_is_used_in_place(parts: list[Path], tmp_path: Path) -> None:
    assert ensure_slice(parts[1], 0, 6, cache_dir=tmp_path / "none").path == parts[0]
    assert not (tmp_path / "none").exists()


def test_only_files_with_own_tensors_are_copied_from(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_slice(parts[0], 0, 1, cache_dir=tmp_path)  # all digests are known now
    copied: set[str] = set()
    real = os.copy_file_range

    def copy(source: int, *rest: int) -> int:
        copied.add(os.path.basename(os.readlink(f"/proc/self/fd/{source}")))
        return real(source, *rest)

    monkeypatch.setattr(os, "copy_file_range", copy)
    info = ensure_slice(parts[0], 5, 6, cache_dir=tmp_path)
    header = read_gguf(parts[0])
    expected = {t.file.path.name for name, t in header.tensors.items() if name.startswith("blk.5.")}
    shared = {t.file.path.name for name, t in header.tensors.items() if not name.startswith("blk.")}
    assert copied == expected | shared | {parts[0].name}  # the first one has the metadata
    assert parts[1].name not in copied
    assert info.layer_start == 5


def test_what_does_not_fit_is_refused(tied: Path, parts: list[Path], tmp_path: Path) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(GGUFError, match=message) as caught:
            read_gguf(parts[0])
        assert caught.value.path.name == name

    stray = parts[0].with_name("tied-00004-of-00003.gguf")
    stray.write_bytes(b"")
    refused(stray.name, "is one too many: the model has 3 files")
    stray.unlink()
    second = parts[1].read_bytes()
    parts[1].unlink()
    refused(parts[1].name, "no such file; the model has 3 files, all are needed")
    parts[1].write_bytes(parts[2].read_bytes())
    refused(parts[1].name, "split.no is 2, its name says 1")
    parts[1].write_bytes(second[:-4096])
    refused(parts[1].name, "truncated")
    other = tmp_path / "other"
    other.mkdir()
    strange = split_model(tied, other, changes={1: {"tensors.count": 7}})
    parts[1].write_bytes(strange[1].read_bytes())
    refused(parts[1].name, "is of another model than tied-00001-of-00003.gguf: split.tensors.count")
    parts[1].write_bytes(split_model(write_tiny(tmp_path / "tied.gguf", layers=1), other)[1].read_bytes())
    refused(parts[1].name, "of another model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: {"count": 4}}, "one of 4 files of a model .* has to end in -00001-of-00004.gguf"),
        ({0: {"count": 60000}}, "one of 60000 files"),
        ({2: {"count": 2}}, "split.count is 2, its name says 3"),
        ({2: {"no": 0}}, "split.no is 0, its name says 2"),
        ({index: {"tensors.count": 99} for index in range(3)}, "99 tensors .* its 3 files have 56"),
    ],
)
def test_counts_that_lie(
    tied: Path, tmp_path: Path, changes: dict[int, dict[str, int]], message: str
) -> None:
    with pytest.raises(GGUFError, match=message):
        read_gguf(split_model(tied, tmp_path, changes=changes)[0])


def test_a_tensor_in_two_files_is_refused(tied: Path, tmp_path: Path) -> None:
    two = split_model(tied, tmp_path, 2)
    three = split_model(tied, tmp_path, 3, changes={1: {"count": 2}})
    two[1].write_bytes(three[1].read_bytes())  # begins with tensors that the first file of two has
    with pytest.raises(GGUFError, match=r"has tensor 'blk\..*, which tied-00001-of-00002.gguf has, too"):
        read_gguf(two[0])


def test_a_file_has_to_keep_its_name(parts: list[Path]) -> None:
    renamed = parts[0].with_name("model.gguf")
    parts[0].rename(renamed)
    with pytest.raises(GGUFError, match="so its name has to end in"):
        read_gguf(renamed)

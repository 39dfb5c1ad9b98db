"""Layer packages: written whole, read as the model they were made of, and no more of them than is needed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skippy.models import (
    CheckpointError,
    GGUFError,
    GGUFHeader,
    LayerRangeError,
    LazyArray,
    Manifest,
    Package,
    PackageError,
    Recipe,
    SliceWriteError,
    ensure_slice,
    file_sha256,
    find_part,
    inspect_model,
    read_model,
    write_package,
    write_slice,
)
from skippy.models.layout import FilePlan, copied
from skippy.models.loading import load_mode_of
from skippy.models.slicer import write_plan
from tests.support.splitting import split_model
from tests.support.tiny_models import write_tiny

SHARED = {"model-package.json", "shared/metadata.gguf"}


@pytest.fixture
def package(untied: Path, tmp_path: Path) -> Path:
    return write_package(untied, tmp_path / "package").folder


_opened: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
        _opened.append(os.path.abspath(os.fspath(arguments[0])))


sys.addaudithook(_watch)


@contextlib.contextmanager
def opened_in(folder: Path) -> Iterator[set[str]]:
    """The files below ``folder`` that this process opens inside the block."""
    global _opened
    names: set[str] = set()
    _opened = []
    try:
        yield names
    finally:
        names |= {os.path.relpath(path, folder) for path in _opened if path.startswith(f"{folder}/")}
        _opened = None


def edit(package: Path, change: dict[str, Any]) -> None:
    """Change values of a manifest, given by paths such as ``layers.2.sha256``; None removes."""
    file = package / "model-package.json"
    manifest = json.loads(file.read_text())
    for path, value in change.items():
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        place: Any = manifest
        for step in way:
            place = place[step]
        if value is None:
            del place[last]
        else:
            place[last] = value
    file.write_text(json.dumps(manifest))


def test_the_manifest(untied: Path, package: Path) -> None:
    manifest = json.loads((package / "model-package.json").read_text())
    digest = file_sha256(untied)
    assert {key: value for key, value in manifest.items() if key not in ("shared", "layers")} == {
        "schema_version": 1,
        "format": "layer-package",
        "skippy_abi_version": "0.1.0",
        "model_id": "untied",
        "layer_count": 6,
        "activation_width": 64,
        "projectors": [],
        "source_model": {
            "path": "untied.gguf",
            "sha256": digest,
            "primary_file": "untied.gguf",
            "files": [{"path": "untied.gguf", "size_bytes": untied.stat().st_size, "sha256": digest}],
        },
    }
    assert [layer["layer_index"] for layer in manifest["layers"]] == list(range(6))
    source = GGUFHeader.read(untied)
    names: list[str] = []
    for artifact in (*manifest["shared"].values(), *manifest["layers"]):
        path = package / artifact["path"]
        part = GGUFHeader.read(path)
        assert artifact["artifact_bytes"] == path.stat().st_size
        assert artifact["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert artifact["tensor_count"] == len(part.tensors)
        assert artifact["tensor_bytes"] == sum(t.nbytes for t in part.tensors.values())
        names += part.tensors
    assert sorted(names) == sorted(source.tensors)
    assert list(GGUFHeader.read(package / "shared/embeddings.gguf").tensors) == ["token_embd.weight"]
    assert list(GGUFHeader.read(package / "shared/output.gguf").tensors) == ["output.weight"]


@pytest.mark.parametrize("source", ["tied", "untied", "parts"])
def test_slices_are_those_of_the_model(request: pytest.FixtureRequest, tmp_path: Path, source: str) -> None:
    model = request.getfixturevalue("tied" if source == "parts" else source)
    if source == "parts":
        model = split_model(model, tmp_path)[0]
    folder = write_package(model, tmp_path / "package").folder
    for start, end in ((0, 2), (2, 4), (4, 6)):
        mine = find_part(folder, "layer-package", start, end)
        other = ensure_slice(model, start, end, cache_dir=tmp_path / "other")
        assert mine.path.read_bytes() == other.path.read_bytes()
        assert mine.source_sha256 == other.source_sha256
    assert read_model(folder).tensors.keys() == read_model(model).tensors.keys()
    whole, summary = inspect_model(model), inspect_model(folder)
    assert (summary.parameters, summary.bytes_per_layer) == (whole.parameters, whole.bytes_per_layer)


def test_all_layers_are_put_together(untied: Path, package: Path, tmp_path: Path) -> None:
    info = ensure_slice(package, 0, 6, cache_dir=tmp_path / "c")
    whole = write_slice(GGUFHeader.read(untied), tmp_path / "whole.gguf", 0, 6)
    assert info.path.read_bytes() == whole.path.read_bytes()


@pytest.mark.parametrize(
    ("start", "end", "own"),
    [(0, 2, {"shared/embeddings.gguf"}), (2, 4, set()), (4, 6, {"shared/output.gguf"})],
)
def test_a_stage_opens_its_own_parts_only(
    package: Path, tmp_path: Path, start: int, end: int, own: set[str]
) -> None:
    layers = {f"layers/layer-{index:05}.gguf" for index in range(start, end)}
    for name in ("layers/layer-00000.gguf", "layers/layer-00005.gguf"):
        if name not in layers:
            (package / name).unlink()  # another machine's
    with opened_in(package) as opened:
        ensure_slice(package, start, end, cache_dir=tmp_path / "c")
    assert opened == SHARED | layers | own


def test_the_last_stage_of_a_tied_model_opens_the_embedding(tied: Path, tmp_path: Path) -> None:
    folder = write_package(tied, tmp_path / "package").folder
    with opened_in(folder) as opened:
        ensure_slice(folder, 5, 6, cache_dir=tmp_path / "c")
    assert opened == SHARED | {"layers/layer-00005.gguf", "shared/embeddings.gguf"}


def test_the_identity_is_that_of_the_bytes(untied: Path, package: Path, tmp_path: Path) -> None:
    def identity(folder: Path, **options: Any) -> str | None:
        return ensure_slice(folder, 2, 4, cache_dir=tmp_path / "c", **options).content_sha256

    first = identity(package)
    assert first is not None
    twin = write_package(untied, tmp_path / "twin", model_id="another name").folder
    assert identity(twin) == first
    other = write_tiny(tmp_path / "o.gguf", "qwen2", tied=False, weights="Q8_0", seed=1)
    assert identity(write_package(other, tmp_path / "other").folder) != first
    # A layer of another stage counts, too: states depend on all that came before.
    stranger = tmp_path / "other" / "layers/layer-00000.gguf"
    shutil.copy(stranger, twin / "layers/layer-00000.gguf")
    edit(twin, {"layers.0.sha256": file_sha256(stranger)})
    assert identity(twin) != first
    unchecked = identity(package, verify=False)
    assert unchecked not in (None, first)
    os.utime(package / "layers/layer-00003.gguf", ns=(1, 1))
    assert identity(package, verify=False) not in (None, first, unchecked)
    assert identity(package) == first


def test_digests_are_checked_once_for_each_state_of_a_file(package: Path, tmp_path: Path) -> None:
    def stages(verify: bool = True) -> list[str]:
        seen: list[str] = []
        ensure_slice(
            package,
            2,
            3,
            cache_dir=tmp_path / "c",
            progress=lambda what, *_: seen.append(what),
            verify=verify,
        )
        return sorted(set(seen))

    assert stages() == ["hash", "write"]
    assert stages() == []
    part = package / "layers/layer-00002.gguf"
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    os.utime(part, ns=(1, 1))
    assert stages() == ["hash"]
    part.write_bytes(raw)
    with pytest.raises(PackageError, match="is damaged or was changed: its SHA-256 is .*, the manifest says"):
        stages()
    assert stages(verify=False) == ["write"]
    raw[-1] ^= 1
    part.write_bytes(raw)
    assert stages() == ["hash"]  # and the slice that is right is still there


def test_a_package_of_another_writer_needs_no_list_of_tensors(package: Path, tmp_path: Path) -> None:
    def weights() -> dict[str, bytes]:
        header = GGUFHeader.read(ensure_slice(package, 2, 4, cache_dir=tmp_path / "c").path)
        raw = header.path.read_bytes()
        return {t.name: raw[t.offset : t.offset + t.nbytes] for t in header.tensors.values()}

    expected = weights()
    part = package / "shared/metadata.gguf"
    part.write_bytes(part.read_bytes().replace(b"skippy.package.", b"strange.package"))
    edit(package, {"shared.metadata.sha256": file_sha256(part), "unknown": {"key": 1}})
    assert weights() == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schema_version": 2}, "schema_version is 2, this version reads 1"),
    ({"schema_version": True}, "schema_version is true or false, expected a whole number"),
    ({"format": "x"}, "format is 'x', expected 'layer-package'"),
    ({"model_id": " "}, "model_id is blank"),
    ({"model_id": None}, "model_id is missing"),
    ({"model_id": "a\x1b[2J"}, r"model_id is 'a\\x1b\[2J', must be printable, at most 512 characters"),
    ({"model_id": "a\udc80"}, "must be printable"),
    ({"skippy_abi_version": "1.0.0"}, "skippy_abi_version is 1.0.0, this version reads 0.0 to 0.1"),
    ({"skippy_abi_version": "0.2.0"}, "skippy_abi_version is 0.2.0"),
    ({"skippy_abi_version": "0.1"}, "expected three numbers"),
    ({"layer_count": 0}, "layer_count is 0, must be 1 to"),
    ({"layer_count": 5}, r"layers\[5\].layer_index is 5, but layer_count is 5"),
    ({"layer_count": 7}, "layer_count is 7, the metadata part says 6"),
    ({"activation_width": 65}, "activation_width is 65, the metadata part says 64"),
    ({"layers.3.layer_index": 2}, r"layers\[3\].layer_index is 2, which another part has, too"),
    ({"layers.3": 7}, r"layers\[3\] is a number, expected an object"),
    ({"layers.3": None}, "has no part with tensor 'blk.3"),
    ({"layers.3.sha256": "x"}, r"layers\[3\].sha256 is 'x', expected 64 hexadecimal digits"),
    ({"layers.3.sha256": "0" * 64}, "is damaged or was changed"),
    ({"layers.3.artifact_bytes": 0}, r"layers\[3\].artifact_bytes is 0, must be 1 to"),
    ({"layers.3.artifact_bytes": 10**6}, "bytes, the manifest says 1000000"),
    ({"layers.3.artifact_bytes": 10**30}, "artifact_bytes is 1000000000000000000000000000000, must be"),
    ({"layers.3.tensor_count": 0}, "tensor_count is 0 and tensor_bytes .*; both are zero or neither is"),
    ({"layers.3.tensor_count": 3}, "lists 12 tensors of .* bytes for .*, the manifest says 3 of"),
    ({"layers.3.tensor_bytes": 1}, "the manifest says 12 of 1"),
    ({"layers.3.path": "layers/layer-00002.gguf"}, "'layers/layer-00002.gguf' is the path of two parts"),
    ({"layers.3.path": "layers/none.gguf"}, "a part that is missing from the package"),
    ({"layers.3.path": "layers"}, "is no regular file"),
    ({"layers.3.path": "/etc/passwd"}, r"layers\[3\].path is '/etc/passwd': it is absolute"),
    ({"layers.3.path": "../x.gguf"}, r"has an empty part, \. or \.\. in it"),
    ({"layers.3.path": "layers/../../x.gguf"}, r"has an empty part, \. or \.\. in it"),
    ({"layers.3.path": "layers//x.gguf"}, "has an empty part"),
    ({"layers.3.path": "C:\\x.gguf"}, "has a backslash or a colon in it"),
    ({"layers.3.path": "a\0b"}, "is too long or not printable"),
    ({"layers.3.path": "a" * 2000}, "is too long or not printable"),
    ({"source_model.sha256": None}, "source_model.sha256 is missing"),
    ({"source_model.repo": ""}, "source_model.repo is blank"),
    ({"shared.output": None}, "shared.output is missing"),
    ({"projectors": [{"kind": "x"}]}, r"projectors\[0\].kind is 'x', expected 'mmproj'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_wrong_manifests_are_refused(
    package: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    edit(package, change)
    cache = tmp_path / "c"
    with pytest.raises(PackageError, match=message):
        ensure_slice(package, 2, 5, cache_dir=cache)
    assert not (cache / "slices").exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"\xff", "is not UTF-8"),
        (b'{"format": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"schema_version": ' + b"1" * 10_000 + b"}", "is not valid JSON"),
        (b" " * (2 << 20) + b"{}", "has 2097154 bytes, at most 2097152 are read"),
    ],
)
def test_files_that_are_no_manifest(package: Path, raw: bytes, message: str) -> None:
    (package / "model-package.json").write_bytes(raw)
    with pytest.raises(PackageError, match=message):
        Package.open(package)


def test_links_lead_nowhere_else(package: Path, tmp_path: Path) -> None:
    part = package / "layers/layer-00002.gguf"
    outside = tmp_path / "outside.gguf"
    part.rename(outside)
    part.symlink_to(outside)
    with pytest.raises(PackageError, match="leads out of the package, to '"):
        ensure_slice(package, 2, 3, cache_dir=tmp_path / "c")
    part.unlink()
    (package / "elsewhere").mkdir()
    outside.rename(package / "elsewhere/part.gguf")
    part.symlink_to("../elsewhere/part.gguf")
    ensure_slice(package, 2, 3, cache_dir=tmp_path / "c")


def test_a_part_with_another_layer_is_refused(package: Path, tmp_path: Path) -> None:
    shutil.copy(package / "layers/layer-00001.gguf", package / "layers/layer-00002.gguf")
    edit(package, {"layers.2.sha256": file_sha256(package / "layers/layer-00001.gguf")})
    with pytest.raises(PackageError, match=r"has tensor 'blk\.1\..*', but is the part with layer 2"):
        ensure_slice(package, 2, 3, cache_dir=tmp_path / "c")


def test_a_tensor_in_two_parts_is_refused(package: Path, tmp_path: Path) -> None:
    """Which of them a stage takes would depend on the order of reading."""
    parts = [package / f"shared/{name}.gguf" for name in ("embeddings", "output")]
    source = GGUFHeader.read(parts[0])
    write_plan(FilePlan(source, (), tuple(copied(t, n) for n, t in source.tensors.items())), parts[1])
    changed = json.loads((package / "model-package.json").read_text())["shared"]["embeddings"]
    changed |= {"path": "shared/output.gguf", "sha256": file_sha256(parts[1])}
    edit(package, {"shared.output": changed | {"artifact_bytes": parts[1].stat().st_size}})
    with pytest.raises(
        PackageError, match=r"'token_embd.weight': this part has Q8_0 .* list has it in another part"
    ):
        ensure_slice(package, 5, 6, cache_dir=tmp_path / "c")
    metadata = package / "shared/metadata.gguf"
    metadata.write_bytes(metadata.read_bytes().replace(b"skippy.package.", b"strange.package"))
    edit(package, {"shared.metadata.sha256": file_sha256(metadata)})
    with pytest.raises(PackageError, match=r"'token_embd.weight' in shared/output.gguf and in another part"):
        ensure_slice(package, 5, 6, cache_dir=tmp_path / "c")


def test_a_part_that_contradicts_the_list_is_refused(package: Path, tmp_path: Path) -> None:
    part = package / "layers/layer-00002.gguf"
    part.write_bytes(part.read_bytes().replace(b"ffn_norm", b"ffn_form"))
    edit(package, {"layers.2.sha256": file_sha256(part)})
    with pytest.raises(
        PackageError, match=r"tensor 'blk.2.ffn_form.weight': this part has F32 .* list does not"
    ):
        ensure_slice(package, 2, 3, cache_dir=tmp_path / "c")


@pytest.mark.parametrize(
    ("tensor", "dims", "message"),
    [
        ("token_embd.weight", (1 << 60, 1, 0, 0), "damaged: lists tensors of over 1125899906842624 bytes"),
        ("token_embd.weight", (64, 3, 0, 0), "lists 1 tensors of 204 bytes for shared/embeddings.gguf"),
        ("token_embd.weight", (1 << 63, 1 << 63, 0, 0), "lists a tensor 'token_embd.weight' of shape"),
        ("blk.5.attn_q.weight", (1 << 30, 1 << 10, 0, 0), "lists 12 tensors of .* for layers/layer-00005"),
    ],
)
def test_sizes_in_the_list_are_those_of_the_manifest(
    package: Path, tmp_path: Path, tensor: str, dims: tuple[int, ...], message: str
) -> None:
    """A slice has holes of the sizes that the list gives to tensors of parts it does not open."""
    metadata = package / "shared/metadata.gguf"
    keys = GGUFHeader.read(metadata).metadata
    names, sizes = (keys[f"skippy.package.tensor_{key}"].value for key in ("names", "dims"))
    assert isinstance(names, LazyArray)
    assert isinstance(sizes, LazyArray)
    raw = bytearray(metadata.read_bytes())
    struct.pack_into("<4Q", raw, sizes.offset + 32 * list(names).index(tensor), *dims)
    metadata.write_bytes(raw)
    edit(package, {"shared.metadata.sha256": file_sha256(metadata)})
    with pytest.raises(PackageError, match=message):
        ensure_slice(package, 2, 3, cache_dir=tmp_path / "c")


def test_a_manifest_and_a_list_that_lie_together(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippy.models.package.MAX_BYTES", 1000)
    with pytest.raises(PackageError, match="lists tensors of over 1000 bytes"):
        read_model(package)


def test_a_truncated_part_is_refused(package: Path, tmp_path: Path) -> None:
    part = package / "layers/layer-00002.gguf"
    size = part.stat().st_size
    os.truncate(part, 100)
    with pytest.raises(PackageError, match="has 100 bytes, the manifest says"):
        ensure_slice(package, 2, 3, cache_dir=tmp_path / "c")
    os.truncate(part, size - 64)
    edit(package, {"layers.2.artifact_bytes": size - 64})
    with pytest.raises(GGUFError, match="truncated"):
        ensure_slice(package, 2, 3, cache_dir=tmp_path / "c", verify=False)


def test_ranges_that_are_not_there(package: Path, tmp_path: Path) -> None:
    with pytest.raises(LayerRangeError, match="there is no range layers 4:7; the model has 6 layers"):
        ensure_slice(package, 4, 7, cache_dir=tmp_path / "c")


def test_writing_leaves_all_or_nothing(untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "package"
    done: list[tuple[str, int, int]] = []
    write_package(untied, target, progress=lambda *step: done.append(step))
    assert sorted(os.listdir(tmp_path / "new")) == ["package"]
    for what in ("hash", "write"):
        amounts = [(now, total) for name, now, total in done if name == what]
        assert amounts == sorted(amounts)
        assert amounts[-1][0] == amounts[-1][1]
    with pytest.raises(SliceWriteError, match="exists already"):
        write_package(untied, target)

    def stop(what: str, now: int, total: int) -> None:
        if what == "write" and now > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_package(untied, tmp_path / "half", progress=stop)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    size = untied.stat().st_size / 2**20
    with pytest.raises(
        SliceWriteError, match=rf"half: cannot be written: No space left .* {size:.1f} MiB are"
    ):
        write_package(untied, tmp_path / "half")
    assert not [name for name in os.listdir(tmp_path) if "half" in name]


def test_what_a_killed_process_has_left_goes(untied: Path, tmp_path: Path) -> None:
    left = tmp_path / ".p.0a1b2c3d.tmp"
    (left / "layers").mkdir(parents=True)
    (left / "layers/layer-00000.gguf").write_bytes(b"half")
    write_package(untied, tmp_path / "p")
    assert os.listdir(tmp_path) == ["p"]


def test_what_cannot_be_packed(untied: Path, tmp_path: Path) -> None:
    part = ensure_slice(untied, 0, 2, cache_dir=tmp_path / "c").path
    with pytest.raises(GGUFError, match="is a slice; a package is made of the whole model"):
        write_package(part, tmp_path / "p")


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31m", "x" * 513, "\udcff"])
def test_a_name_that_no_manifest_may_have(untied: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(PackageError, match="model_id is .* must be printable"):
        write_package(untied, tmp_path / "p", model_id=name)
    assert list(tmp_path.iterdir()) == []


def test_files_whose_names_are_no_text(untied: Path, tmp_path: Path) -> None:
    for name, called in ((b"m\xff.gguf", "m?"), (b"a\n\x1bb.gguf", "a  b")):
        model = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        shutil.copy(untied, model)
        assert write_package(model, tmp_path / called).model_id == called
        assert GGUFHeader.read(ensure_slice(tmp_path / called, 2, 3, cache_dir=tmp_path / "c").path)


def test_load_modes(untied: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "c"))
    assert (load_mode_of(untied), load_mode_of(package)) == ("runtime-slice", "layer-package")
    part = find_part(untied, "runtime-slice", 2, 4)
    assert find_part(part.path, "artifact-slice", 2, 4) == part
    for path, mode, message in (
        (untied, "layer-package", "it has no model-package.json; `skippy package` makes one"),
        (tmp_path / "none", "layer-package", "there is no such folder"),
        (package, "runtime-slice", "which load_mode runtime-slice does not load; use layer-package"),
        (package, "artifact-slice", "which load_mode artifact-slice does not load"),
    ):
        with pytest.raises(PackageError, match=message):
            find_part(path, mode, 2, 4)
    with pytest.raises(CheckpointError, match="are for SafeTensors checkpoints"):
        ensure_slice(package, 2, 4, recipe=Recipe("Q8_0"))
    with pytest.raises(LayerRangeError, match="has layers 0:6, and load_mode artifact-slice takes a file"):
        find_part(untied, "artifact-slice", 2, 4)
    with pytest.raises(GGUFError, match=r"is a folder without model-package\.json|not a regular file"):
        find_part(tmp_path, "runtime-slice", 2, 4)


def test_a_manifest_can_be_pinned(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "c"))
    digest = hashlib.sha256((package / "model-package.json").read_bytes()).hexdigest()
    assert Manifest.read(package).sha256 == digest
    find_part(package, "layer-package", 2, 4, manifest_sha256=digest.upper())
    with pytest.raises(PackageError, match="has SHA-256 .*, not the one of manifest_sha256, 0000"):
        find_part(package, "layer-package", 2, 4, manifest_sha256="0" * 64)

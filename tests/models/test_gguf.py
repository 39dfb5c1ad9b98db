"""The header reader: right on good files, GGUFError and nothing else on bad ones, little memory on any."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFValueType
from hypothesis import HealthCheck, given, settings, strategies as st

from skippy.models import (
    GGUFError,
    GGUFHeader,
    LazyArray,
    ModelError,
    SliceInfo,
    ValueType,
    inspect_model,
    plan_slice,
)
from tests.support.tiny_models import vocabulary, write_tiny

U32, STRING, ARRAY = int(ValueType.UINT32), int(ValueType.STRING), int(ValueType.ARRAY)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    metadata: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(4096),
) -> bytes:
    metadata, tensors = metadata or [], tensors or []
    head = struct.pack("<4sIQQ", b"GGUF", version, *(counts or (len(tensors), len(metadata))))
    body = head + b"".join(metadata) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + data


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(GGUFError) as caught:
        GGUFHeader.read(path)
    assert caught.value.path == path
    assert str(caught.value) == f"{path}: {caught.value.message}"
    return caught.value.message


def test_tensors_may_not_share_bytes(tmp_path: Path) -> None:
    apart = [tensor("b", (8,), offset=32), tensor("a", (8,))]
    path = tmp_path / "m.gguf"
    path.write_bytes(build(tensors=apart))
    assert set(GGUFHeader.read(path).tensors) == {"a", "b"}
    for dims, offset in (((8,), 0), ((9,), 0), ((64,), 0), ((8,), 32)):
        message = refused(path, build(tensors=[*apart, tensor("c", dims, offset=offset)]))
        assert "overlap" in message
    assert "'a' and 'b' overlap" in refused(path, build(tensors=[apart[0], tensor("a", (9,))]))
    bomb = [tensor(f"t{index}", (1024,)) for index in range(1000)]
    assert "tensors 't0' and 't1' overlap" in refused(path, build(tensors=bomb))


def test_agrees_with_the_reference_reader(tied: Path, untied: Path) -> None:
    for path in (tied, untied):
        header, reference = GGUFHeader.read(path), GGUFReader(path)
        assert header.version == 3
        assert header.data_offset == reference.data_offset
        assert list(header.tensors) == [t.name for t in reference.tensors]
        for expected in reference.tensors:
            found = header.tensors[expected.name]
            assert found.dims == tuple(int(n) for n in expected.shape)
            assert (found.offset, found.nbytes) == (expected.data_offset, expected.n_bytes)
            assert found.type_name == expected.tensor_type.name
        fields = [name for name in reference.fields if not name.startswith("GGUF.")]
        assert list(header.metadata) == fields
        for name in fields:
            value = header.value(name)
            assert (list(value) if isinstance(value, LazyArray) else value) == reference.fields[
                name
            ].contents()


def test_arrays_are_read_on_demand(tied: Path) -> None:
    header = GGUFHeader.read(tied)
    tokens, kinds = header.value("tokenizer.ggml.tokens"), header.value("tokenizer.ggml.token_type")
    assert isinstance(tokens, LazyArray)
    assert isinstance(kinds, LazyArray)
    expected = vocabulary()
    assert len(tokens) == len(expected)
    assert list(tokens) == expected
    assert (tokens[0], tokens[200], tokens[-1]) == (expected[0], expected[200], expected[-1])
    assert (kinds.element_type, kinds[0], kinds[-1]) == (ValueType.INT32, 1, 3)
    assert sum(kind == 3 for kind in kinds) == 3
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            tokens[index]


def test_array_elements_longer_than_the_read_window(tmp_path: Path) -> None:
    words = ["a" * 300_000, "", "b", "c" * 1_000_000, "end"]
    path = write_tiny(tmp_path / "m.gguf", layers=1, extra={"some.words": (GGUFValueType.STRING, words)})
    array = GGUFHeader.read(path).value("some.words")
    assert isinstance(array, LazyArray)
    assert list(array) == words
    assert array[4] == "end"


def test_a_changed_file_is_noticed_when_an_array_is_read(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=1)
    array = GGUFHeader.read(path).value("tokenizer.ggml.tokens")
    assert isinstance(array, LazyArray)
    write_tiny(path, layers=2)
    with pytest.raises(GGUFError, match="changed since its header was read"):
        array[0]


def test_large_vocabulary_takes_little_memory(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=1, tokens=[f"token number {i}" for i in range(131072)])
    tracemalloc.start()
    header = GGUFHeader.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = header.value("tokenizer.ggml.tokens")
    assert isinstance(tokens, LazyArray)
    assert len(tokens) == 131072
    assert tokens[131071] == "token number 131071"
    assert peak < 2 << 20


def test_version_2_and_empty_arrays(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    empty = [
        pair(f"empty.{kind}", ARRAY, struct.pack("<IQ", kind, 0))
        for kind in ValueType
        if kind is not ValueType.ARRAY
    ]
    path.write_bytes(build(empty, [tensor("t", (32, 2), 8)], version=2))
    header = GGUFHeader.read(path)
    assert header.version == 2
    assert all(
        list(entry.value) == [] for entry in header.metadata.values() if isinstance(entry.value, LazyArray)
    )
    assert header.tensors["t"].nbytes == 68


def test_what_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with pytest.raises(GGUFError, match="no such file"):
        GGUFHeader.read(path)
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUFHeader.read(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUFHeader.read(tmp_path / "fifo")
    with pytest.raises(GGUFError, match="cannot be opened"):
        GGUFHeader.read("nul\0byte")
    assert "not a GGUF file: it begins with b''" in refused(path, b"")
    assert "not a GGUF file: it begins with b'PK" in refused(path, b"PK\3\4 and so on")
    assert "Git LFS pointer" in refused(path, b"version https://git-lfs.github.com/spec/v1\n")
    assert "big-endian" in refused(path, struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    for version in (0, 1, 4, 65535):
        assert f"version {version} is not supported" in refused(path, build(version=version))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (build(counts=(1 << 60, 0)), f"claims {1 << 60} tensors"),
        (build(counts=(0, 1 << 60)), f"claims {1 << 60} metadata keys"),
        (build(counts=(100_000, 0)), "a list of 100000 tensors"),
        (build([pair("k", U32, bytes(4)), pair("k", U32, bytes(4))]), "'k' occurs twice"),
        (build([pair("k", 13, bytes(8))]), "'k' has unknown type 13"),
        (build([pair(b"\xff", U32, bytes(4))]), "not UTF-8"),
        (build([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(12))]), "array of arrays"),
        (build([pair("k", ARRAY, struct.pack("<IQ", 99, 1))]), "unknown type 99"),
        (build([pair("k", ARRAY, struct.pack("<IQ", U32, 1 << 62))]), f"array 'k' of {1 << 62}"),
        (build([pair("k", ARRAY, struct.pack("<IQ", STRING, 1 << 62))]), "limit for texts"),
        (build([pair("k", ARRAY, struct.pack("<IQQ", STRING, 2, 1 << 63))]), "a text of array 'k'"),
        (build([pair("k", STRING, struct.pack("<Q", 1 << 40))]), "claims a text of"),
        (build([text("k" * 70_000)]), "claims a text of 70000 bytes"),
        (build([pair("general.alignment", U32, struct.pack("<I", 24))]), "alignment 24"),
        (build([pair("general.alignment", U32, bytes(4))]), "alignment 0"),
        (build([pair("general.alignment", STRING, text("32"))]), "alignment is STRING"),
        (build([], [tensor("t", (4,)), tensor("t", (4,))]), "tensor 't' occurs twice"),
        (build([], [tensor("t" * 64, (4,))]), "claims a text of 64 bytes"),
        (build([], [tensor("t", ())]), "has 0 dimensions"),
        (build([], [tensor("t", (1, 1, 1, 1, 1))]), "has 5 dimensions"),
        (build([], [tensor("t", (0, 4))]), "impossible shape"),
        (build([], [tensor("t", (1 << 40, 1 << 40))]), "impossible shape"),
        (build([], [tensor("t", (4,), 77)]), "unknown ggml type 77"),
        (build([], [tensor("t", (4,), 2)]), "whole blocks of 32"),
        (build([], [tensor("t", (4,), 0, 8)]), "not a multiple of 32"),
        (build([], [tensor("t", (1024,), 0, 32)]), "tensor 't' ends at byte"),
        (build([], [tensor("t", (4,), 0, (1 << 64) - 32)]), "tensor 't' ends at byte"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refused(tmp_path / "m.gguf", content)


def test_keys_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file has gigabytes of them for nothing."""
    monkeypatch.setattr("skippy.models.gguf.MAX_TEXT", 10_000)
    keys = [pair(f"{index}" * 900, U32, bytes(4)) for index in range(10)]
    (tmp_path / "few.gguf").write_bytes(build(keys))
    assert len(GGUFHeader.read(tmp_path / "few.gguf").metadata) == 10
    assert "the limit is" in refused(tmp_path / "m.gguf", build([*keys, pair("k" * 2000, U32, bytes(4))]))
    text_too = pair("text", STRING, text("t" * 2000))
    assert "the limit is" in refused(tmp_path / "m.gguf", build([*keys, text_too]))


def test_error_texts_are_short_and_printable(tmp_path: Path) -> None:
    key = "\x1b[31m\n" + "k" * 60_000
    message = refused(tmp_path / "m.gguf", build([pair(key, U32, bytes(4)), pair(key, U32, bytes(4))]))
    assert message.isprintable()
    assert len(message) < 200
    extra = {"general.name": (GGUFValueType.STRING, "red \x1b[31m" + "x" * 1000)}
    name = inspect_model(write_tiny(tmp_path / "n.gguf", "a" * 300 + "\x1b", layers=2, extra=extra))
    assert name.name.isprintable()
    assert len(name.name) == 200
    assert name.unsplittable is not None
    assert name.unsplittable.isprintable()
    assert len(name.unsplittable) < 300


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path / "m.gguf", layers=1, width=32, heads=1, kv_heads=1, feed_forward=32, tokens=["a", "b"]
    )
    header = GGUFHeader.read(path)
    end = max(tensor.offset + tensor.nbytes for tensor in header.tensors.values())
    os.truncate(path, end)
    assert len(GGUFHeader.read(path).tensors) == len(header.tensors)
    sizes = [*range(end - 1, header.data_offset, -997), *range(header.data_offset, -1, -1)]
    for size in sizes:
        os.truncate(path, size)
        with pytest.raises(GGUFError, match="truncated" if size >= 4 else "not a GGUF"):
            GGUFHeader.read(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_give_a_header_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    seed = tmp_path / "seed.gguf"
    if not seed.exists():
        write_tiny(seed, layers=3, width=32, heads=1, kv_heads=1, feed_forward=32, tokens=["a", "b"])
    content = bytearray(seed.read_bytes())
    head = GGUFHeader.read(seed).data_offset
    edge = st.sampled_from([0, 1, 0xFF, 0x7F, 0x80])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, head - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        patch = data.draw(st.lists(edge | st.integers(0, 255), min_size=width, max_size=width))
        content[start : start + width] = bytes(patch)
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        header = GGUFHeader.read(path)
    except GGUFError:
        pass
    else:
        with contextlib.suppress(ModelError):
            SliceInfo.from_header(header)
            assert plan_slice(header, 1, 2).layer_count > 1
        for info in header.tensors.values():
            assert info.offset + info.nbytes <= len(content)
            assert info.elements == math.prod(info.dims)
        for entry in header.metadata.values():
            if isinstance(entry.value, LazyArray):
                assert len(list(entry.value)) == entry.value.count
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 << 20

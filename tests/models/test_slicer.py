"""Slices: the source's bytes under new numbers, zeros where nothing is needed, no failed writes."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFValueType

from skippy.models import (
    RULES_VERSION,
    BoundaryPart,
    GGUFError,
    GGUFHeader,
    LayerRangeError,
    LazyArray,
    SliceInfo,
    SliceWriteError,
    TensorInfo,
    UnsupportedArchitectureError,
    plan_slice,
    possible_cuts,
    slice_bytes,
    write_slice,
)
from skippy.models.shape import shape_of
from skippy.models.slicer import write_plan
from skippy.models.tiny import write_tiny_model
from tests.support.tiny_models import vocabulary, write_tiny

LAYERS = 6


def cut(source: Path, folder: Path, start: int, end: int) -> GGUFHeader:
    info = write_slice(GGUFHeader.read(source), folder / f"{start}-{end}.gguf", start, end)
    assert info == SliceInfo.from_file(info.path)
    return GGUFHeader.read(info.path)


def data(header: GGUFHeader, tensor: TensorInfo) -> bytes:
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


def check_layers(source: GGUFHeader, piece: GGUFHeader, start: int, end: int) -> None:
    """Own layers equal the source's bytes; the spare layer has the last one's shapes and is zero."""
    for tensor in source.tensors.values():
        if not tensor.name.startswith("blk."):
            continue
        _, index, rest = tensor.name.split(".", 2)
        if start <= int(index) < end:
            own = piece.tensors[f"blk.{int(index) - start}.{rest}"]
            assert (own.dims, own.type) == (tensor.dims, tensor.type)
            assert data(piece, own) == data(source, tensor)
            if int(index) == end - 1 and end < LAYERS:
                spare = piece.tensors[f"blk.{end - start}.{rest}"]
                assert (spare.dims, spare.type) == (tensor.dims, tensor.type)
                assert data(piece, spare) == bytes(tensor.nbytes)
    per_layer = sum(name.startswith("blk.0.") for name in source.tensors)
    own_layers = end - start + (end < LAYERS)
    assert sum(name.startswith("blk.") for name in piece.tensors) == per_layer * own_layers
    assert piece.count(f"{piece.text('general.architecture')}.block_count") == own_layers


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 5), (1, 2), (2, 5), (5, 6), (1, 6)])
@pytest.mark.parametrize("tie", ["tied", "untied"])
def test_layers(request: pytest.FixtureRequest, tmp_path: Path, tie: str, start: int, end: int) -> None:
    source = GGUFHeader.read(request.getfixturevalue(tie))
    piece = cut(source.path, tmp_path, start, end)
    check_layers(source, piece, start, end)
    norm = "output_norm.weight"
    assert data(piece, piece.tensors[norm]) == data(source, source.tensors[norm])
    assert [t.name for t in GGUFReader(piece.path).tensors] == list(
        piece.tensors
    )  # a second opinion on the format


def test_first_slice_has_the_embedding_and_no_head(untied: Path, tmp_path: Path) -> None:
    source, piece = GGUFHeader.read(untied), cut(untied, tmp_path, 0, 2)
    assert "output.weight" not in piece.tensors
    embedding = piece.tensors["token_embd.weight"]
    assert data(piece, embedding) == data(source, source.tensors["token_embd.weight"])
    tokens = piece.value("tokenizer.ggml.tokens")
    assert isinstance(tokens, LazyArray)
    assert list(tokens) == vocabulary()
    assert piece.text("tokenizer.chat_template") == source.text("tokenizer.chat_template")


def test_middle_slice_has_no_vocabulary(untied: Path, tmp_path: Path) -> None:
    piece = cut(untied, tmp_path, 2, 4)
    assert [key for key in piece.metadata if key.startswith("tokenizer.")] == ["tokenizer.ggml.model"]
    assert piece.text("tokenizer.ggml.model") == "no_vocab"
    assert piece.count("qwen2.vocab_size") == 1
    assert piece.tensors["token_embd.weight"].dims == (64, 1)
    assert "output.weight" not in piece.tensors


def test_last_slice_tied_and_untied(tied: Path, untied: Path, tmp_path: Path) -> None:
    source, piece = GGUFHeader.read(tied), cut(tied, tmp_path, 4, 6)
    embedding = source.tensors["token_embd.weight"]
    assert data(piece, piece.tensors["token_embd.weight"]) == data(source, embedding)
    source, piece = GGUFHeader.read(untied), cut(untied, tmp_path, 4, 6)
    head, embedding = source.tensors["output.weight"], source.tensors["token_embd.weight"]
    assert data(piece, piece.tensors["output.weight"]) == data(source, head)
    assert piece.tensors["token_embd.weight"].dims == embedding.dims
    assert data(piece, piece.tensors["token_embd.weight"]) == bytes(embedding.nbytes)


def test_families_that_insist_on_a_head_get_a_hole(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", "internlm2", tied=False)
    first, middle = cut(model, tmp_path, 0, 2), cut(model, tmp_path, 2, 4)
    rows = len(vocabulary())
    head = first.tensors["output.weight"]
    assert head.dims == (64, rows)
    assert data(first, head) == bytes(head.nbytes)
    assert middle.tensors["output.weight"].dims == (64, 1)


def test_metadata_is_copied_and_slice_keys_added(tied: Path, tmp_path: Path) -> None:
    source, piece = GGUFHeader.read(tied), cut(tied, tmp_path, 0, 2)
    changed = {"llama.block_count"}
    raw, mine = tied.read_bytes(), piece.path.read_bytes()
    for key, entry in source.metadata.items():
        if key not in changed:
            own = piece.metadata[key]
            assert mine[own.start : own.end] == raw[entry.start : entry.end]
    assert {key: entry.value for key, entry in piece.metadata.items() if key.startswith("skippy.slice.")} == {
        "skippy.slice.layer_start": 0,
        "skippy.slice.layer_end": 2,
        "skippy.slice.layer_count": LAYERS,
        "skippy.slice.front_layers": 0,
        "skippy.slice.spare_layers": 1,
        "skippy.slice.vocab_size": len(vocabulary()),
        "skippy.slice.rules_version": RULES_VERSION,
        "skippy.slice.tied": True,
        "skippy.slice.input": "",
        "skippy.slice.boundary": "l_out-1:64",
        "skippy.slice.takes_tokens": False,
        "skippy.slice.source_sha256": hashlib.sha256(raw).hexdigest(),
    }


def test_per_layer_arrays_are_cut(tmp_path: Path) -> None:
    extra: dict[str, tuple[GGUFValueType, Any]] = {
        "llama.attention.head_count_kv": (GGUFValueType.UINT32, [10, 11, 12, 13, 14, 15]),
        "llama.longer": (GGUFValueType.INT16, [*range(-4, 4)]),
        "llama.flags": (GGUFValueType.BOOL, [True, False, True, False, False, True]),
        "llama.names": (GGUFValueType.STRING, ["a", "", "längst", "d", "e", "f"]),
        "llama.short": (GGUFValueType.UINT32, [1, 2, 3]),
        "llama.rope.dimension_sections": (GGUFValueType.INT32, [1] * 6),
        "other.array": (GGUFValueType.UINT32, [0, 1, 2, 3, 4, 5]),
    }
    piece = cut(write_tiny(tmp_path / "m.gguf", extra=extra), tmp_path, 1, 3)
    found = {key: piece.value(key) for key in extra}
    assert {key: list(value) for key, value in found.items() if isinstance(value, LazyArray)} == {
        "llama.attention.head_count_kv": [11, 12, 12],
        "llama.longer": [-3, -2, -2],
        "llama.flags": [False, True, True],
        "llama.names": ["", "längst", "längst"],
        "llama.short": [1, 2, 3],
        "llama.rope.dimension_sections": [1] * 6,
        "other.array": [0, 1, 2, 3, 4, 5],
    }


def test_alignment_of_the_source_is_kept(tmp_path: Path) -> None:
    for alignment in (8, 256):
        extra: dict[str, tuple[GGUFValueType, Any]] = {"general.alignment": (GGUFValueType.UINT32, alignment)}
        model = write_tiny(tmp_path / "m.gguf", extra=extra)
        piece = cut(model, tmp_path, 0, 2)
        assert piece.alignment == alignment
        check_layers(GGUFHeader.read(model), piece, 0, 2)
        assert all(tensor.offset % alignment == 0 for tensor in piece.tensors.values())


def test_slices_are_sparse(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", "llama", 4, tied=False, width=512, feed_forward=1024)
    header = GGUFHeader.read(model)
    for start, end in ((0, 1), (1, 2), (1, 4)):
        info = write_slice(header, tmp_path / f"{start}.gguf", start, end)
        status = info.path.stat()
        planned = slice_bytes(header, start, end)
        assert (
            status.st_size
            == info.file_bytes
            == plan_slice(header, start, end, source_sha256="0" * 64).file_bytes
        )
        holes = status.st_size - planned
        assert holes > 500_000
        assert planned - 4096 <= status.st_blocks * 512 <= planned + 16 * 4096


@pytest.mark.model
def test_the_middle_of_the_bundled_model_is_small(bundled_model: Path, tmp_path: Path) -> None:
    header = GGUFHeader.read(bundled_model)
    info = write_slice(header, tmp_path / "s.gguf", 10, 20)
    assert info.path.stat().st_blocks * 512 < 23_000_000
    assert slice_bytes(header, 10, 20) < 23_000_000
    piece = GGUFHeader.read(info.path)
    assert "tokenizer.ggml.tokens" not in piece.metadata
    assert piece.tensors["token_embd.weight"].dims == (576, 1)


def test_a_model_without_embedding_is_refused(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", layers=3)
    model.write_bytes(model.read_bytes().replace(b"token_embd.weight", b"token_embd.weighs"))
    with pytest.raises(GGUFError, match=r"no tensor 'token_embd\.weight'"):
        plan_slice(GGUFHeader.read(model), 1, 2)


def test_whole_range_is_a_plain_copy_for_any_family(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", "gemma2", layers=3)
    source, piece = GGUFHeader.read(model), cut(model, tmp_path, 0, 3)
    assert list(piece.tensors) == list(source.tensors)
    for name, tensor in source.tensors.items():
        assert data(piece, piece.tensors[name]) == data(source, tensor)
    info = SliceInfo.from_file(piece.path)
    assert (info.is_whole, info.spare_layers, info.outputs) == (True, 0, ())


def test_slice_info(tied: Path, untied: Path, tmp_path: Path) -> None:
    whole = SliceInfo.from_file(untied)
    assert (whole.layer_start, whole.layer_end, whole.layer_count, whole.spare_layers) == (
        0,
        LAYERS,
        LAYERS,
        0,
    )
    assert (whole.architecture, whole.hidden_size, whole.context_length, whole.vocab_size) == (
        "qwen2",
        64,
        512,
        269,
    )
    assert (whole.outputs, whole.tied, whole.source_sha256, whole.is_whole) == ((), False, None, True)
    info = SliceInfo.from_file(cut(tied, tmp_path, 2, 5).path)
    assert (info.layer_start, info.layer_end, info.layer_count, info.own_layers) == (2, 5, LAYERS, 3)
    assert info.outputs == (BoundaryPart("l_out-2", 64),)
    assert (info.front_layers, info.spare_layers, info.tied, info.vocab_size) == (0, 1, True, 269)
    assert (info.inputs, info.input_width, info.output_width, info.takes_tokens) == ((), 64, 64, False)
    assert (info.is_first, info.is_last, info.hidden_size) == (False, False, 64)
    assert info.source_sha256 == hashlib.sha256(tied.read_bytes()).hexdigest()
    last = SliceInfo.from_file(cut(tied, tmp_path, 5, 6).path)
    assert (last.is_last, last.outputs, last.spare_layers) == (True, (), 0)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (0, 7), (3, 3), (4, 2), (6, 7)])
def test_wrong_ranges(tied: Path, tmp_path: Path, start: int, end: int) -> None:
    with pytest.raises(LayerRangeError, match=r"has 6 layers, valid is START:END with 0 <= START < END <= 6"):
        write_slice(GGUFHeader.read(tied), tmp_path / "s.gguf", start, end)
    assert list(tmp_path.iterdir()) == []


def test_a_slice_cannot_be_sliced(tied: Path, tmp_path: Path) -> None:
    piece = cut(tied, tmp_path, 1, 4)
    with pytest.raises(LayerRangeError, match=r"itself a slice \(1:4 of 6 layers\)"):
        write_slice(piece, tmp_path / "again.gguf", 2, 3)


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    for arch, words in (
        ("gemma4", "per-layer embeddings carried across"),
        ("rwkv7", "a copy of layer 0 in every slice"),
        ("apertus", "which was not done"),
        ("hrm_text", "one pass through a pipeline cannot give"),
        ("never-heard-of", "no slicing rule for it is known"),
    ):
        header = GGUFHeader.read(write_tiny(tmp_path / "m.gguf", arch, layers=2))
        with pytest.raises(
            UnsupportedArchitectureError, match=f"'{arch}' cannot be split yet: .*{words}"
        ) as caught:
            write_slice(header, tmp_path / "s.gguf", 0, 1)
        assert caught.value.architecture == arch


@pytest.mark.parametrize(
    ("key", "value", "first", "later"),
    [
        ("leading_dense_block_count", 2, 3, 1),  # layers 0, 1 and a spare one like 1; 1, 2 and one like 2
        ("embedding_scale", 12.0, 12.0, 0.0),
        ("n_deepstack_layers", 3, 0, 0),
        ("nextn_predict_layers", 1, 0, 0),
    ],
)
def test_what_a_key_says_of_the_whole_model(
    tmp_path: Path, key: str, value: float, first: float, later: float
) -> None:
    kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
    extra: dict[str, tuple[GGUFValueType, Any]] = {f"llama.{key}": (kind, value)}
    model = write_tiny(tmp_path / "m.gguf", layers=5, extra=extra)
    for start, expected in ((0, first), (1, later)):
        piece = cut(model, tmp_path, start, start + 2)
        assert piece.value(f"llama.{key}") == expected
        assert piece.value("llama.block_count") == 3


def test_a_kind_of_layer_that_is_only_in_front(tmp_path: Path) -> None:
    """Of families whose layers go by their index, a middle slice takes it from there, by whole periods."""
    windows = [index == 2 for index in range(12)]
    model = tmp_path / "m.gguf"
    write_tiny_model(model, "smallthinker", 12, metadata={"attention.sliding_window_pattern": windows})
    header = GGUFHeader.read(model)
    for start in range(12):
        for end in range(start + 1, 13):
            picks = plan_slice(header, start, end).picks
            assert len(picks.front) % 4 == start % 4
            assert 2 in picks.all
            assert len(picks.all) < 24
    assert plan_slice(header, 8, 9).picks.front == (0, 1, 2, 3, 4, 5, 6, 7)


def test_as_many_layers_as_change_the_arithmetic(tmp_path: Path) -> None:
    """What other models' slices must not have, all slices of such a model need."""
    header = GGUFHeader.read(write_tiny_model(tmp_path / "m.gguf", "smallthinker", 4))
    for start in range(4):
        for end in range(start + 1, 5):
            assert len(plan_slice(header, start, end).picks.all) == 4
    assert "the number of layers: not to be changed" in shape_of(header)


def test_more_layers_than_the_type_of_their_number_holds(tmp_path: Path) -> None:
    metadata = {
        "block_count": {"value": 127, "type": "INT8"},
        "attention.compress_ratios": [0] * 126 + [4],
    }
    header = GGUFHeader.read(write_tiny_model(tmp_path / "m.gguf", "llama", 127, metadata=metadata))
    plan = plan_slice(header, 0, 126)
    assert len(plan.picks.all) > 127
    write_plan(plan, tmp_path / "s.gguf")
    assert GGUFHeader.read(tmp_path / "s.gguf").count("llama.block_count") == len(plan.picks.all)


def test_layers_that_differ_in_too_many_ways(tmp_path: Path) -> None:
    """Of 512 that all differ, choosing spare layers for every cut would take minutes."""
    for ways, refused in ((32, False), (33, True)):
        metadata = {"attention.compress_ratios": list(range(ways))}
        header = GGUFHeader.read(write_tiny_model(tmp_path / "m.gguf", "llama", 40, metadata=metadata))
        if refused:
            with pytest.raises(GGUFError, match="its layers differ in 33 ways, at most 32 do"):
                possible_cuts(header)
        else:
            assert len(possible_cuts(header)) == 39


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    extra: dict[str, tuple[GGUFValueType, Any]] = {"llama.nextn_predict_layers": (GGUFValueType.UINT32, 1)}
    last = cut(write_tiny(tmp_path / "m.gguf", layers=5, extra=extra), tmp_path, 2, 4)
    assert last.value("llama.block_count") == 2
    assert {name.split(".")[1] for name in last.tensors if name.startswith("blk.")} == {"0", "1"}


def test_looped_models_are_refused(tmp_path: Path) -> None:
    for loops, refused in ((1, False), (2, True)):
        extra: dict[str, tuple[GGUFValueType, Any]] = {"nanbeige.num_loops": (GGUFValueType.UINT32, loops)}
        header = GGUFHeader.read(write_tiny(tmp_path / "m.gguf", "nanbeige", layers=2, extra=extra))
        if refused:
            with pytest.raises(UnsupportedArchitectureError, match="num_loops above 1"):
                plan_slice(header, 0, 1)
        else:
            assert plan_slice(header, 0, 1).picks.back == (0,)


def test_one_file_of_several_by_itself_is_refused(tmp_path: Path) -> None:
    extra: dict[str, tuple[GGUFValueType, Any]] = {"split.count": (GGUFValueType.UINT16, 4)}
    model = write_tiny(tmp_path / "m.gguf", layers=2, extra=extra)
    with pytest.raises(GGUFError, match="one of 4 files of a model, which have to be read together"):
        plan_slice(GGUFHeader.read(model), 0, 1)
    with pytest.raises(GGUFError, match="one of 4 files"):
        SliceInfo.from_file(model)


def test_impossible_layer_counts(tmp_path: Path) -> None:
    for count in (0, 4_000_000_000):
        extra: dict[str, tuple[GGUFValueType, Any]] = {"llama.block_count": (GGUFValueType.UINT32, count)}
        model = write_tiny(tmp_path / "m.gguf", layers=2, extra=extra)
        with pytest.raises(GGUFError, match=f"{count} layers do not fit"):
            SliceInfo.from_file(model)
    extra = {"llama.block_count": (GGUFValueType.UINT32, 4)}
    header = GGUFHeader.read(write_tiny(tmp_path / "m.gguf", layers=2, extra=extra))
    with pytest.raises(GGUFError, match="no tensors of layer 2"):
        plan_slice(header, 1, 3)


def test_the_source_is_never_overwritten(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", layers=2)
    before = model.read_bytes()
    (tmp_path / "link.gguf").symlink_to(model)
    for out in (model, tmp_path / "link.gguf"):
        with pytest.raises(SliceWriteError, match="is the source model"):
            write_slice(GGUFHeader.read(model), out, 0, 1)
    assert model.read_bytes() == before


def test_a_failed_write_leaves_nothing(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    header = GGUFHeader.read(tied)
    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", full)
        with pytest.raises(SliceWriteError, match=r"No space left .* MiB are needed in"):
            write_slice(header, tmp_path / "s.gguf", 0, 3)
    with pytest.raises(SliceWriteError, match="cannot be written: No such file or directory"):
        write_slice(header, tmp_path / "no" / "folder.gguf", 0, 3)

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "write" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_slice(header, tmp_path / "s.gguf", 0, 3, stop)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left_beside_it_goes(tied: Path, tmp_path: Path) -> None:
    (tmp_path / ".s.gguf.0a1b2c3d.tmp").write_bytes(b"half")
    write_slice(GGUFHeader.read(tied), tmp_path / "s.gguf", 0, 1)
    assert os.listdir(tmp_path) == ["s.gguf"]


def test_copies_without_help_from_the_kernel(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cut(tied, tmp_path, 1, 3).path.read_bytes()

    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert cut(tied, tmp_path, 1, 3).path.read_bytes() == first
    monkeypatch.delattr(os, "copy_file_range")
    assert cut(tied, tmp_path, 1, 3).path.read_bytes() == first


def test_a_source_that_changes_is_noticed(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", layers=4)
    header = GGUFHeader.read(model)

    def shorten(stage: str, done: int, total: int) -> None:
        if stage == "write":
            os.truncate(model, header.data_offset + 100)

    with pytest.raises(GGUFError, match="while being copied"):
        write_slice(header, tmp_path / "s.gguf", 0, 2, shorten)
    with pytest.raises(GGUFError, match="changed since its header was read"):
        write_slice(header, tmp_path / "s.gguf", 0, 2, source_sha256="0" * 64)
    assert list(tmp_path.iterdir()) == [model]


def test_a_source_that_is_written_to_while_it_is_copied(tmp_path: Path) -> None:
    """Of the same length; the slice would be kept under the digest of what the source was before."""
    model = write_tiny(tmp_path / "m.gguf", layers=4)
    header = GGUFHeader.read(model)

    def change(stage: str, done: int, total: int) -> None:
        if stage == "write" and done > total // 2:
            with model.open("r+b") as file:
                file.seek(header.data_offset)
                file.write(bytes(64))

    with pytest.raises(GGUFError, match="changed while it was read"):
        write_slice(header, tmp_path / "s.gguf", 0, 2, change, source_sha256="0" * 64)
    assert list(tmp_path.iterdir()) == [model]


def test_progress_adds_up(tied: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    header = GGUFHeader.read(tied)
    write_slice(header, tmp_path / "s.gguf", 0, 3, lambda *call: calls.append(call))
    hashes = [call for call in calls if call[0] == "hash"]
    writes = [call for call in calls if call[0] == "write"]
    assert [*hashes, *writes] == calls
    assert hashes[-1] == ("hash", header.file_size, header.file_size)
    assert [done for _, done, _ in writes] == sorted(done for _, done, _ in writes)
    assert {total for *_, total in writes} == {slice_bytes(header, 0, 3)}
    assert 0 <= writes[-1][2] - writes[-1][1] < 64 * len(header.tensors)  # all but the padding

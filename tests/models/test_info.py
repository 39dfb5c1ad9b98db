"""Summaries, and the table of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFValueType

from skippy.models import (
    FAMILIES,
    CutError,
    GGUFError,
    GGUFHeader,
    SliceInfo,
    ensure_slice,
    family_of,
    inspect_model,
    plan_slice,
    possible_cuts,
    write_package,
)
from skippy.models.families import NEEDS
from skippy.models.info import split_layer_name
from skippy.models.tiny import write_tiny_model
from tests.support.splitting import split_model
from tests.support.tiny_models import CHAT_TEMPLATE, write_tiny


def test_inspect_a_model(untied: Path) -> None:
    summary = inspect_model(untied)
    reference = GGUFReader(untied).tensors
    assert summary.slice == SliceInfo.from_file(untied)
    assert summary.name == "tiny qwen2"
    assert summary.parameters == sum(t.n_elements for t in reference)
    assert sum(summary.quantisation.values()) == sum(t.n_bytes for t in reference)
    assert list(summary.quantisation) == ["Q8_0", "F32"]
    expected = sum(t.n_bytes for t in reference if t.name.startswith("blk.2."))
    assert summary.bytes_per_layer == (expected,) * 6
    assert summary.other_bytes == sum(t.n_bytes for t in reference if not t.name.startswith("blk."))
    assert summary.unsplittable is None
    assert summary.cuts == (1, 2, 3, 4, 5)


def test_inspect_says_where(tmp_path: Path) -> None:
    summary = inspect_model(write_tiny_model(tmp_path / "m.gguf", "hy_v4"))
    assert (summary.cuts, summary.unsplittable) == ((2, 4), None)
    header = GGUFHeader.read(write_tiny(tmp_path / "deep.gguf", layers=513, width=8, heads=1, kv_heads=1))
    assert possible_cuts(header) == ()
    with pytest.raises(CutError, match="513 layers, llama.cpp takes at most 512"):
        plan_slice(header, 0, 1)


def test_inspect_says_why_not(tied: Path, tmp_path: Path) -> None:
    gemma = inspect_model(write_tiny(tmp_path / "g.gguf", "gemma4", layers=2))
    assert gemma.unsplittable is not None
    assert "'gemma4' cannot be split yet" in gemma.unsplittable
    single = inspect_model(write_tiny(tmp_path / "s.gguf", layers=1))
    assert single.unsplittable == "it has a single layer"
    piece = inspect_model(ensure_slice(tied, 1, 3, cache_dir=tmp_path).path)
    assert piece.unsplittable == "already a slice, layers 1:3 of 6"
    assert len(piece.bytes_per_layer) == 3


def test_the_name_falls_back_on_the_file(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "some-model.gguf", layers=1)
    raw = model.read_bytes().replace(b"general.name", b"general.nome")
    model.write_bytes(raw)
    assert inspect_model(model).name == "some-model"


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("llama.block_count", GGUFValueType.STRING, "six", "is STRING, expected a non-negative integer"),
        ("llama.block_count", GGUFValueType.BOOL, True, "is BOOL, expected a non-negative integer"),
        ("llama.embedding_length", GGUFValueType.INT32, -1, "is INT32, expected a non-negative integer"),
        ("general.name", GGUFValueType.UINT32, 3, "is UINT32, expected a text"),
        ("llama.context_length", GGUFValueType.UINT32, [1], "is ARRAY, expected a non-negative integer"),
    ],
)
def test_keys_of_a_wrong_type(
    tmp_path: Path, key: str, kind: GGUFValueType, value: Any, message: str
) -> None:
    model = write_tiny(tmp_path / "m.gguf", layers=2, extra={key: (kind, value)})
    with pytest.raises(GGUFError, match=f"metadata key '{key}' {message}"):
        inspect_model(model)


def test_absurd_sizes(tmp_path: Path) -> None:
    absurd = {"llama.embedding_length": (0, 1 << 40), "llama.vocab_size": (1 << 31, 1 << 62)}
    for key, values in absurd.items():
        for value in values:
            model = write_tiny(tmp_path / "m.gguf", layers=2, extra={key: (GGUFValueType.UINT64, value)})
            raw = model.read_bytes()
            model.write_bytes(raw.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.t_kens"))
            with pytest.raises(GGUFError, match=f"damaged: an? .* of {value}"):
                SliceInfo.from_file(model)


def test_missing_keys(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", layers=2)
    raw = model.read_bytes()
    for key in (b"general.architecture", b"llama.block_count"):
        model.write_bytes(raw.replace(key, key[:-1] + b"_"))
        with pytest.raises(GGUFError, match=f"metadata key '{key.decode()}' is missing"):
            SliceInfo.from_file(model)


def test_slice_keys_that_contradict(tied: Path, tmp_path: Path) -> None:
    piece = ensure_slice(tied, 1, 3, cache_dir=tmp_path).path
    header = GGUFHeader.read(piece)
    raw = bytearray(piece.read_bytes())
    at = header.metadata["skippy.slice.layer_end"].end - 4
    raw[at] = 5
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(raw)
    with pytest.raises(GGUFError, match="says it is a slice 1:5 of 6 layers"):
        SliceInfo.from_file(damaged)


def test_the_table(tied: Path) -> None:
    family = family_of(GGUFHeader.read(tied))
    assert (family.architecture, family.output_required) == ("llama", False)
    assert family.boundary.format(7) == "l_out-7"
    assert {"llama", "qwen2", "qwen3", "mistral3", "qwen3moe", "phi3"} <= FAMILIES.keys()
    assert FAMILIES["phi2"].output_required
    assert not FAMILIES.keys() & NEEDS.keys()
    assert all(name == entry.architecture for name, entry in FAMILIES.items())
    assert all(NEEDS.values())


def test_what_a_model_is_in(tied: Path, tmp_path: Path) -> None:
    summary = inspect_model(tied)
    assert (summary.tokenizer, summary.template, summary.files) == ("gpt2", len(CHAT_TEMPLATE), 1)
    parts = inspect_model(split_model(tied, tmp_path)[0])
    assert (parts.cuts, parts.files) == (summary.cuts, 3)
    package = inspect_model(write_package(tied, tmp_path / "package").folder)
    assert (package.cuts, package.template, package.files) == (summary.cuts, len(CHAT_TEMPLATE), 9)
    assert package.bytes_per_layer == summary.bytes_per_layer


def test_digits_are_those_of_ascii() -> None:
    """Otherwise two tensors would have one name in a slice."""
    assert split_layer_name("blk.13.attn_q.weight") == (13, "attn_q.weight")
    for name in (
        "blk.1\N{ARABIC-INDIC DIGIT THREE}.attn_q.weight",
        "blk.013.a",
        "blk.-1.a",
        "blk.1.",
        "blk.1",
    ):
        assert split_layer_name(name) is None

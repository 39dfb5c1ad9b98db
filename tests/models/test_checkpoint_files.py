"""Checkpoint folders that lie: each refused by name, quickly, and with nothing big in memory."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from skippy.models import CheckpointError, GGUFHeader, ModelError, ensure_slice, header_path, is_checkpoint
from skippy.models.checkpoint import Checkpoint
from skippy.models.checkpoint.imatrix import ImportanceMatrix
from skippy.models.checkpoint.safetensors import read_header
from skippy.models.checkpoint.sentencepiece import read_pieces
from tests.support.checkpoints import write_checkpoint, write_safetensors

Header = dict[str, Any]


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: list[Any], dtype: str = "F32") -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_header(tmp_path: Path) -> None:
    data = bytes(range(12))
    header = {"__metadata__": {"format": "pt"}, "b": entry(8, 12, [2], "F16"), "a": entry(0, 8, [2, 1])}
    path = write(tmp_path / "m.safetensors", header, data)
    tensors = read_header(path)
    start = path.stat().st_size - 12
    assert {n: (t.dtype, t.shape, t.offset, t.nbytes) for n, t in tensors.items()} == {
        "a": ("F32", (2, 1), start, 8),
        "b": ("F16", (2,), start + 8, 4),
    }


LIES: dict[str, tuple[object, bytes, int | None, str]] = {
    "no length": (b"", b"", None, "not valid JSON"),
    "length beyond the file": ({}, b"", 99, "truncated: claims a header of 99 bytes, has 2"),
    "absurd length": ({}, b"", 1 << 62, "claims a header of 4611686018427387904 bytes, the limit is"),
    "not JSON": (b"{]", b"", None, "the header is not valid JSON"),
    "a list": ([], b"", None, "the header is not a JSON object"),
    "twice": (b'{"a": 1, "a": 2}', b"", None, "the key 'a' appears twice"),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None, "nested too deep"),
    "lists": (b'{"a":[' + b"[]," * (1 << 20) + b"0]}", b"", None, "has over 1048576 lists and objects or"),
    "values": (b'{"a":[' + b"0," * (1 << 22) + b"0,0]}", b"", None, "or 4194304 values, the limits"),
    "NaN": (b'{"a": NaN}', b"", None, "NaN is not a JSON number"),
    "missing key": ({"a": {"dtype": "F32"}}, b"", None, "needs exactly dtype, shape and data_offsets"),
    "type": ({"a": entry(0, 4, [1], "F128")}, bytes(4), None, "has the unknown type 'F128'"),
    "negative": ({"a": entry(0, 4, [-1])}, bytes(4), None, "has an impossible shape"),
    "boolean": ({"a": entry(0, 4, [True])}, bytes(4), None, "has an impossible shape"),
    "dimensions": ({"a": entry(0, 4, [1] * 9)}, bytes(4), None, "has an impossible shape; expected up to 8"),
    "backwards": ({"a": entry(4, 0, [1])}, bytes(4), None, "has impossible data_offsets"),
    "size": ({"a": entry(0, 4, [2])}, bytes(4), None, "has 4 bytes of data, its type and shape make 8"),
    "overflow": ({"a": entry(0, 4, [1 << 62, 1 << 62])}, bytes(4), None, "its type and shape make"),
    "beyond the end": ({"a": entry(0, 8, [2])}, bytes(4), None, "truncated: tensor 'a' ends at byte"),
    "overlap": (
        {"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, bytes(8), None, "tensor 'b' overlaps tensor 'a'"),
    "gap": (
        {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12), None, "leaves a gap behind tensor 'a'"),
    "rest": ({"a": entry(0, 4, [1])}, bytes(9), None, "5 bytes behind tensor 'a' belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(lie: str, tmp_path: Path) -> None:
    header, data, length, reason = LIES[lie]
    path = write(tmp_path / "m.safetensors", header, data, length)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as failure:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reason in str(failure.value)
    assert str(path) in str(failure.value)
    assert peak < (4 << 20) + 2 * path.stat().st_size


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ModelError):
        path = Path(folder, "any.safetensors")
        path.write_bytes(data)
        read_header(path)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_sentencepiece_model(data: bytes) -> None:
    try:
        assert read_pieces(Path("tokenizer.model"), data)
    except CheckpointError as error:
        assert "SentencePiece" in str(error)  # noqa: PT017


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", layers=2, width=64, feed_forward=64, shards=2)


def test_what_a_folder_is(folder: Path) -> None:
    assert is_checkpoint(folder)
    assert not is_checkpoint(folder / "config.json")
    assert not is_checkpoint(folder.parent)
    assert "model.layers.1.mlp.up_proj.weight" in Checkpoint.open(folder).tensors
    (folder / "model-package.json").write_text("{}")  # such a folder may have a config.json, too
    assert not is_checkpoint(folder)


def test_a_folder_without_safetensors(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"has no weights; expected model\.safetensors or .* its shards"
    ):
        ensure_slice(folder, 0, 1, cache_dir=folder / "c")


def index_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "model.safetensors.index.json").read_text()))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a\\b.safetensors", "sub/x.safetensors", ""]
)
def test_an_index_may_not_leave_the_folder(name: str, folder: Path) -> None:
    (folder.parent / "outside.safetensors").write_bytes(b"")
    places = index_of(folder)["weight_map"] | {"model.norm.weight": name}
    edit(folder / "model.safetensors.index.json", weight_map=places)
    with pytest.raises(CheckpointError, match=r"expected a \.safetensors file of the same folder"):
        Checkpoint.open(folder)


def test_an_index_that_lies(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    places = index_of(folder)["weight_map"]
    edit(index, weight_map=places | {"model.more.weight": places["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"says that 'model\.more\.weight' is in .* no such tensor"):
        Checkpoint.open(folder)
    edit(index, weight_map={"a": 3})
    with pytest.raises(CheckpointError, match="weight_map must give a file for each tensor"):
        Checkpoint.open(folder)
    edit(index, weight_map={f"t{number}": f"{number}.safetensors" for number in range(5000)})
    with pytest.raises(CheckpointError, match="names 5000 files, the limit is 4096"):
        Checkpoint.open(folder)


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard 'model-00002-of-00002.safetensors' is missing"):
        ensure_slice(folder, 0, 1, cache_dir=folder / "c")


def test_a_missing_tensor(folder: Path) -> None:
    places = {name: file for name, file in index_of(folder)["weight_map"].items() if "1.mlp.up" not in name}
    edit(folder / "model.safetensors.index.json", weight_map=places)
    with pytest.raises(CheckpointError, match=r"has no tensor for 'blk\.1\.ffn_up\.weight'"):
        ensure_slice(folder, 0, 1, cache_dir=folder / "c")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["BertModel"]}, "of architecture 'BertModel' are not converted"),
    "no architecture": ({"architectures": None}, "of architecture '' are not converted"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "that are quantised already are not"),
    "absurd layers": (
        {"num_hidden_layers": 1 << 40},
        "num_hidden_layers is '1099511627776', expected a count",
    ),
    "more layers": ({"num_hidden_layers": 3}, r"has no tensor for 'blk\.2\.attn_norm\.weight'"),
    "fewer layers": ({"num_hidden_layers": 1}, "of a layer that config.json does not count"),
    "absurd width": ({"hidden_size": 10**30}, "hidden_size is"),
    "text": ({"hidden_size": "64"}, "hidden_size is '64', expected a count"),
    "width": ({"hidden_size": 128}, r"has the shape \[269, 64\], config.json makes it \[269, 128\]"),
    "vocabulary": ({"vocab_size": 100}, r"has the shape \[269, 64\], config.json makes it \[100, 64\]"),
    "odd heads": ({"head_dim": 15}, "head_dim is 15, rotary positions need an even number"),
    "kv heads": ({"num_key_value_heads": 8}, "num_key_value_heads is '8', expected a count from 1 to 4"),
    "no head": ({"tie_word_embeddings": False}, "has no tensor for 'output.weight'"),
    "epsilon": ({"rms_norm_eps": -1}, "rms_norm_eps is '-1', expected a positive number"),
    "rotary": ({"rope_scaling": {"rope_type": "longrope"}}, "of type 'longrope' is not converted"),
    "rotary factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.factor is 'None'"),
    "rotary list": ({"rope_scaling": [1]}, "rope_parameters is not an object"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_does_not_fit(name: str, folder: Path) -> None:
    changes, reason = CONFIGS[name]
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=reason):
        header_path(folder, cache_dir=folder / "c")
    assert not list((folder / "c").rglob("*.gguf"))


WINDOW, FULL = "sliding_attention", "full_attention"
FAMILY_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("qwen2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; .* with silu or swish only"),
    "scaling": ("qwen2", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "type 'llama3' is not"),
    "experts": ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob is 'False'; .* with True only"),
    "kinds": ("qwen3", {"layer_types": [WINDOW, FULL]}, f"layer_types: llama.cpp has no {WINDOW} for"),
    "gemma scaling": ("gemma", {"rope_scaling": {"rope_type": "llama3"}}, "type 'llama3' is not converted"),
    "gemma2 both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
    "gemma2 activation": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; llama.cpp"),
    "gemma2 cap": ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is 'None', expected"),
    "gemma2 final cap": ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping is '-1', exp"),
    "gemma2 scalar": ("gemma2", {"query_pre_attn_scalar": 224}, "query_pre_attn_scalar is '224'; .* with 16"),
    "gemma2 no scalar": ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is 'None'"),
    "gemma2 window": ("gemma2", {"sliding_window": None}, "sliding_window is 'None', expected a count"),
    "gemma2 no windows": ("gemma2", {"layer_types": [FULL] * 2}, f"llama.cpp needs {WINDOW} in some layers"),
    "gemma2 pattern": ("gemma2", {"sliding_window_pattern": 3}, "sliding_window_pattern is '3'; .* 2 only"),
    "gemma2 parts": ("gemma2", {"rope_parameters": {FULL: {}}}, "the same for all layers of this architect"),
    "gemma3 both ways": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
    "gemma3 not causal": ("gemma3", {"is_causal": False}, "is_causal is 'False'; .* with True only"),
    "gemma3 cap": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is '50.0'; .* null"),
    "gemma3 scalar": ("gemma3", {"query_pre_attn_scalar": True}, "query_pre_attn_scalar is 'True'"),
    "gemma3 pattern": ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is '0', expected"),
    "gemma3 kinds": ("gemma3", {"layer_types": [FULL, "chunked_attention"]}, "layer_types may have full_att"),
    "gemma3 odd kinds": ("gemma3", {"layer_types": [[], {}]}, "layer_types may have full_attention and"),
    "gemma3 fewer kinds": ("gemma3", {"layer_types": [FULL]}, "layer_types has 1 entries, expected one for"),
    "gemma3 no kinds": ("gemma3", {"layer_types": 3}, "layer_types may have full_attention and"),
    "gemma3 yarn": ("gemma3", {"rope_scaling": {"rope_type": "yarn"}}, "type 'yarn' is not converted here"),
    "gemma3 base": ("gemma3", {"rope_local_base_freq": -1}, "rope_local_base_freq is '-1', expected a"),
    "gemma3 parts": ("gemma3", {"rope_parameters": {FULL: {}, WINDOW: 3}}, "rope_parameters is not an obj"),
    "gemma3 window scaling": (
        "gemma3",
        {"rope_parameters": {FULL: {}, WINDOW: {"rope_type": "linear", "factor": 8.0}}},
        "sliding_attention: scaling of type 'linear' is not converted",
    ),
    "gemma3 with images": (
        "gemma3",
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        "of architecture 'Gemma3ForConditionalGeneration' are not converted",
    ),
}


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_what_a_family_is_not_computed_with(name: str, tmp_path: Path) -> None:
    family, changes, reason = FAMILY_CONFIGS[name]
    folder = write_checkpoint(tmp_path / "m", family, layers=2, width=64, feed_forward=64)
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=reason):
        header_path(folder, cache_dir=folder / "c")
    assert not list((folder / "c").rglob("*.gguf"))


@pytest.mark.parametrize(
    ("family", "tensor", "missing"),
    [
        ("gemma2", "post_attention_layernorm", "post_attention_norm"),
        ("gemma2", "pre_feedforward_layernorm", "ffn_norm"),
        ("gemma3", "post_feedforward_layernorm", "post_ffw_norm"),
        ("gemma3", "self_attn.k_norm", "attn_k_norm"),
    ],
)
def test_a_missing_norm(family: str, tensor: str, missing: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", family, layers=2, width=64, feed_forward=64, shards=2)
    places = {
        name: file for name, file in index_of(folder)["weight_map"].items() if f"1.{tensor}" not in name
    }
    edit(folder / "model.safetensors.index.json", weight_map=places)
    with pytest.raises(CheckpointError, match=rf"has no tensor for 'blk\.1\.{missing}\.weight'"):
        header_path(folder, cache_dir=folder / "c")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"])
def test_a_bias_that_llama_cpp_has_no_place_for(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", family, layers=2, width=64, feed_forward=64, shards=2)
    name = "model.layers.1.self_attn.o_proj.bias"
    write_safetensors(folder / "bias.safetensors", {name: np.zeros(64, np.float32)}, "BF16")
    places = index_of(folder)["weight_map"] | {name: "bias.safetensors"}
    edit(folder / "model.safetensors.index.json", weight_map=places)
    with pytest.raises(CheckpointError, match=r"o_proj\.bias' has no place in a model of this architecture"):
        header_path(folder, cache_dir=folder / "c")


TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unigram": (lambda t: t["model"].update(type="Unigram"), "its model is not BPE"),
    "no vocabulary": (lambda t: t["model"].update(vocab=[]), "model.vocab must be an object"),
    "id": (lambda t: t["model"]["vocab"].update(x=1 << 40), "token 'x' has the id '1099511627776'"),
    "same id": (lambda t: t["model"]["vocab"].update(x=5), "token 'x' has the id '5', taken"),
    "added": (lambda t: t["added_tokens"].append({"content": "x", "id": -1}), "added token 'x' has an id"),
    "words": (
        lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "(a+)+$"}),
        r"cuts text into words by '\(a\+\)\+\$', for which llama.cpp has no known rule",
    ),
    "no words": (lambda t: t.update(pre_tokenizer=None), "has no pre_tokenizer of a kind that is converted"),
    "merges": (lambda t: t["model"].update(merges=[]), "its byte-level BPE has no merges"),
    "odd merges": (lambda t: t["model"].update(merges=[3]), "files are damaged: ValueError"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_is_not_converted(name: str, folder: Path) -> None:
    change, reason = TOKENIZERS[name]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=reason):
        header_path(folder, cache_dir=folder / "c")


HALF = "\ud800"  # of a surrogate pair: JSON can say it, UTF-8 cannot


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", lambda t: t["model"]["vocab"].update({HALF: t["model"]["vocab"].pop("a")})),
        ("tokenizer.json", lambda t: t["added_tokens"].append({"content": HALF, "id": 3})),
        ("tokenizer.json", lambda t: t["model"]["merges"].append(f"{HALF} a")),
        ("tokenizer_config.json", lambda t: t.update(chat_template=HALF)),
        ("tokenizer_config.json", lambda t: t.update(chat_template=[{"name": HALF, "template": "x"}])),
    ],
)
def test_texts_that_are_no_unicode(file: str, change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    path = folder / file
    value = json.loads(path.read_text()) if path.exists() else {}
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="files are damaged: a text that is not Unicode: surrogates"):
        header_path(folder, cache_dir=folder / "c")
    assert not list((folder / "c").rglob("*.gguf"))


def test_an_importance_matrix_of_counts(folder: Path) -> None:
    """A sparse file has 10^8 of them for nothing."""
    count = 1 << 19
    infos = b""
    for index, name in enumerate(("a.in_sum2", "a.counts", "b.in_sum2", "b.counts", "c.in_sum2", "c.counts")):
        infos += len(name).to_bytes(8, "little") + name.encode()
        infos += struct.pack("<IQIQ", 1, count, 0, 4 * count * index)
    path = folder / "imatrix.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 6, 0) + infos)
    os.truncate(path, 24 * count + 4096)
    with pytest.raises(CheckpointError, match="has over 1048576 counts, which is the limit"):
        ImportanceMatrix.open(path)


def test_texts_that_are_too_large(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 1 << 40)  # a hole
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has 1099511627776 bytes, at most"):
        header_path(folder, cache_dir=folder / "c")


def test_templates_that_are_no_templates(folder: Path) -> None:
    header_path(folder, cache_dir=folder / "c")
    first = Checkpoint.open(folder).fingerprint()
    (folder / "chat_template.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match="its tokenizer's files are damaged: RecursionError"):
        header_path(folder, cache_dir=folder / "c")
    (folder / "chat_template.json").unlink()
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tools.jinja").write_text("{{ messages }}")
    assert Checkpoint.open(folder).fingerprint() != first
    os.mkfifo(more / "endless.jinja")
    with pytest.raises(CheckpointError, match=r"endless\.jinja: is no regular file"):
        header_path(folder, cache_dir=folder / "c")
    (more / "endless.jinja").unlink()
    os.truncate(more / "tools.jinja", 1 << 40)  # a hole
    with pytest.raises(CheckpointError, match=r"tools\.jinja: has 1099511627776 bytes, at most"):
        header_path(folder, cache_dir=folder / "c")


def test_shards_are_bounded_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippy.models.checkpoint.folder.MAX_TENSORS", 12)
    with pytest.raises(CheckpointError, match="names files with over 12 tensors, which is the limit"):
        Checkpoint.open(folder)


def test_a_checkpoint_is_itself_however_it_is_cut_into_files(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "a" / "m", layers=2, width=64, feed_forward=64)
    three = write_checkpoint(tmp_path / "b" / "m", layers=2, width=64, feed_forward=64, shards=3)
    other = write_checkpoint(tmp_path / "c" / "m", layers=2, width=64, feed_forward=64, seed=1)
    prints = [Checkpoint.open(folder).fingerprint() for folder in (one, three, other)]
    assert prints[0] == prints[1] != prints[2]
    slices = [ensure_slice(folder, 0, 1, cache_dir=tmp_path / "cache") for folder in (one, three, other)]
    assert slices[0].path == slices[1].path != slices[2].path


def test_a_changed_row_that_no_sample_meets_makes_another_slice(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", layers=2, width=256, feed_forward=1024)
    before, opened = Checkpoint.open(folder).fingerprint(), Checkpoint.open(folder)
    tensor = opened.tensors["model.layers.0.mlp.up_proj.weight"]
    first = ensure_slice(folder, 0, 1, cache_dir=tmp_path / "c")
    with tensor.file.path.open("r+b") as file:
        file.seek(tensor.offset + 5000)
        file.write(b"\1\2")
    assert Checkpoint.open(folder).fingerprint() == before
    second = ensure_slice(folder, 0, 1, cache_dir=tmp_path / "c")
    assert first.path != second.path
    assert first.source_sha256 == second.source_sha256  # what stages compare
    assert None is not first.content_sha256 != second.content_sha256  # what kept states belong to
    assert GGUFHeader.read(second.path).tensors.keys() == GGUFHeader.read(first.path).tensors.keys()

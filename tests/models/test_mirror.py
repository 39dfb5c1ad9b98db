"""Small models like a given one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType

from skippy.models import GGUFHeader, LazyArray, mirror
from skippy.models.info import layer_count
from skippy.models.mirror import MirrorError, tiny_like
from skippy.models.shape import shape_of
from skippy.models.tiny import write_tiny_model
from tests.support.families import VARIANTS, Variant
from tests.support.tiny_models import write_tiny

NAMED = {str(variant): variant for variant in VARIANTS}


def again(header: GGUFHeader, folder: Path, *, closely: bool = True) -> GGUFHeader:
    """The small model like this one, written and read."""
    return GGUFHeader.read(tiny_like(header, closely=closely).write(folder / "again.gguf"))


def metadata(header: GGUFHeader) -> dict[str, Any]:
    prefix = header.text("general.architecture") + "."
    return {
        key.removeprefix(prefix): list(entry.value) if isinstance(entry.value, LazyArray) else entry.value
        for key, entry in header.metadata.items()
        if key.startswith(prefix)
    }


@pytest.mark.parametrize(
    "name",
    [
        "llama with a tied head",
        "gemma2 without sliding_window_pattern",
        "jamba",
        "nemotron_h",
        "deepseek4",
        "qwen4exp",
        "glm4moe with multi-token prediction",
        "deci with incomplete layers",
        "smollm3 of 9 layers",
    ],
)
def test_a_small_model_is_like_itself(name: str, tmp_path: Path) -> None:
    variant: Variant = NAMED[name]
    header = GGUFHeader.read(variant.write(tmp_path / "model.gguf"))
    found = again(header, tmp_path)
    assert {n: t.dims for n, t in found.tensors.items()} == {n: t.dims for n, t in header.tensors.items()}
    # Sizes that the file leaves to defaults are written out.
    assert metadata(found).items() >= metadata(header).items()
    assert shape_of(found) == shape_of(header)


def test_other_widths_and_the_same_depth(tmp_path: Path) -> None:
    extra = {
        "llama.rope.scaling.type": (GGUFValueType.STRING, "yarn"),
        "llama.rope.scaling.factor": (GGUFValueType.FLOAT32, 4.0),
        "llama.novel": (GGUFValueType.INT32, [5, 6, 7, 8, 9]),
    }
    header = GGUFHeader.read(write_tiny(tmp_path / "model.gguf", "llama", 5, width=192, heads=3, extra=extra))
    found = again(header, tmp_path)
    assert layer_count(found) == 5
    assert set(found.tensors) == set(header.tensors)
    assert "output.weight" not in found.tensors
    assert found.tensors["blk.4.ffn_up.weight"].dims == (256, 384)
    values = metadata(found)
    assert (values["embedding_length"], values["attention.head_count"], values["vocab_size"]) == (256, 2, 128)
    assert (values["rope.scaling.type"], values["rope.scaling.factor"]) == ("yarn", 4.0)
    assert values["novel"] == [5, 6, 7, 8, 9]
    assert "attention.sliding_window" not in values


def test_roughly_like_it(tmp_path: Path) -> None:
    """The architecture's tensors, and of the metadata what decides on slicing."""
    pattern = {"attention.sliding_window_pattern": [0, 1, 1], "novel": 3, "attention.scale": 0.5}
    header = GGUFHeader.read(
        write_tiny_model(
            tmp_path / "model.gguf", "gemma2", 7, metadata=pattern, tensors={"blk.2.odd.weight": (3, 5)}
        )
    )
    with pytest.raises(MirrorError, match="has a tensor odd.weight, which the small models"):
        tiny_like(header)
    found = again(header, tmp_path, closely=False)
    assert set(found.tensors) == set(header.tensors) - {"blk.2.odd.weight"}
    values = metadata(found)
    assert values["attention.sliding_window_pattern"] == [0, 1, 1, 0, 1, 1, 0]
    assert "novel" not in values
    assert values["attention.scale"] == pytest.approx(0.08838835)


def test_layers_of_several_kinds_in_another_order(tmp_path: Path) -> None:
    heads = {f"attention.head_count{which}": [2, 0] for which in ("", "_kv")}
    header = GGUFHeader.read(write_tiny_model(tmp_path / "model.gguf", "jamba", 4, metadata=heads))
    for closely in (True, False):
        found = again(header, tmp_path, closely=closely)
        assert ["blk.%d.ssm_a" % i in found.tensors for i in range(4)] == [False, True, False, True]  # noqa: UP031
        assert metadata(found)["attention.head_count_kv"] == [2, 0, 2, 0]


def test_tensors_that_the_small_models_have_not(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_q_norm.weight": (64,),  # other architectures have it
        "blk.1.ffn_down.bias": (256,),  # a bias has the width of what it is added to
        "rope_factors_long.weight": (64,),
        "blk.0.attn_novel.weight": (256, 384),  # widths that are known
    }
    header = GGUFHeader.read(write_tiny_model(tmp_path / "model.gguf", "llama", tensors=dict(tensors)))
    found = again(header, tmp_path)
    assert {name: found.tensors[name].dims for name in tensors} == tensors


def test_what_has_no_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = GGUFHeader.read(write_tiny(tmp_path / "a.gguf", "apertus", 2))
    with pytest.raises(MirrorError, match="no small model of its architecture"):
        tiny_like(unknown)
    deep = GGUFHeader.read(
        write_tiny(tmp_path / "b.gguf", extra={"llama.block_count": (GGUFValueType.UINT32, 1 << 30)})
    )
    with pytest.raises(MirrorError, match=f"it has {1 << 30} layers"):
        tiny_like(deep)
    long = GGUFHeader.read(
        write_tiny(tmp_path / "c.gguf", extra={"llama.novel": (GGUFValueType.UINT32, [1] * 5000)})
    )
    with pytest.raises(MirrorError, match="novel has 5000 entries"):
        tiny_like(long)
    monkeypatch.setattr(mirror, "MOST_BYTES", 1 << 20)
    with pytest.raises(MirrorError, match="a small model like it would have 1[0-9] MiB"):
        tiny_like(GGUFHeader.read(write_tiny_model(tmp_path / "d.gguf", "llama")))

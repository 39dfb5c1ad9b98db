"""LoRA adapters cut by layer: a chain computes what the unsplit model does with the whole adapter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from skippy.engine import EngineOptions
from skippy.engine.llama import LlamaEngine
from skippy.models import GGUFError, GGUFHeader, cut_adapter, ensure_slice
from tests.engine.chains import Chain, bits
from tests.support.adapters import write_adapter
from tests.support.splitting import split_model
from tests.support.tiny_models import write_tiny

TOKENS = [[3, 141, 59, 26, 200, 7], [7, 91, 12, 250]]
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def computed(model: Path, edges: Iterable[int], cache: Path, *adapters: tuple[Path, float]) -> list[bytes]:
    """What a chain cut at ``edges`` computes with these adapters, each with a scale."""
    stages = []
    for start, end in itertools.pairwise(edges):
        part = ensure_slice(model, start, end, cache_dir=cache)
        own = [cut_adapter(path, scale, part, cache_dir=cache) for path, scale in adapters]
        options = EngineOptions(
            context_length=64,
            max_sequences=1,
            n_threads=1,
            n_threads_batch=1,
            adapters=tuple((adapter.path, adapter.scale) for adapter in own if adapter.path is not None),
        )
        stages.append(LlamaEngine.load(part, options))
    try:
        return bits(Chain(stages).run(TOKENS, 4))
    finally:
        for stage in stages:
            stage.close()


@pytest.mark.parametrize(("arch", "weights"), [("qwen2", "F32"), ("llama", "Q8_0"), ("cohere2", "F32")])
def test_a_chain_is_exact(arch: str, weights: str, tmp_path: Path) -> None:
    tied = arch == "cohere2"
    model = (
        write_tiny(tmp_path / "m.gguf", arch, 4, tied, weights=weights) if not tied else _windowed(tmp_path)
    )
    names = [f"blk.{layer}.{name}.weight" for layer in (0, 1, 3) for name in MATRICES]
    if not tied:
        names.append("output.weight")
    adapter = write_adapter(tmp_path / "lora.gguf", model, names)
    cache = tmp_path / "c"
    whole = computed(model, (0, 4), cache, (adapter, 1.0))
    assert computed(model, (0, 2, 3, 4), cache, (adapter, 1.0)) == whole
    assert computed(model, (0, 1, 4), cache, (adapter, 1.0)) == whole
    assert whole != computed(model, (0, 4), cache)
    assert whole != computed(model, (0, 4), cache, (adapter, 0.5))


def test_a_chain_with_two_adapters_is_exact(tmp_path: Path) -> None:
    """Also where they change the same matrices, and where a slice has to do with one of them only."""
    model, cache = write_tiny(tmp_path / "m.gguf", "llama", 4, weights="Q8_0"), tmp_path / "c"
    pair = [
        (_of_layers(tmp_path / "first.gguf", model, (0, 1, 3), rank=4), 1.0),
        (_of_layers(tmp_path / "second.gguf", model, (1, 2, 3), rank=6), -0.5),
    ]
    whole = computed(model, (0, 4), cache, *pair)
    assert computed(model, (0, 1, 2, 4), cache, *pair) == whole
    assert computed(model, (0, 3, 4), cache, *pair) == whole
    for other in (pair[:1], pair[1:], [pair[0], (pair[1][0], 0.5)]):
        assert computed(model, (0, 4), cache, *other) != whole


def _of_layers(path: Path, model: Path, layers: Iterable[int], rank: int) -> Path:
    names = [f"blk.{layer}.{name}.weight" for layer in layers for name in MATRICES]
    return write_adapter(path, model, names, rank=rank)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", "llama", 4), tmp_path / "c"
    adapter = _of_layers(tmp_path / "lora.gguf", model, (0, 3), rank=4)
    first = split_model(model, tmp_path)[0]
    assert computed(first, (0, 4), cache, (adapter, 1.0)) == computed(model, (0, 2, 4), cache, (adapter, 1.0))


def _windowed(tmp_path: Path) -> Path:
    from tests.support.tiny_models import write_tiny_windowed

    return write_tiny_windowed(tmp_path / "m.gguf", layers=4)


def test_what_a_part_holds(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", "qwen2", 4, False)
    adapter = write_adapter(
        tmp_path / "lora.gguf", model, ["blk.1.ffn_up.weight", "blk.3.attn_q.weight", "output.weight"]
    )

    def part(start: int, end: int) -> list[str] | None:
        own = cut_adapter(
            adapter, 2.0, ensure_slice(model, start, end, cache_dir=tmp_path), cache_dir=tmp_path
        )
        assert own.scale == 2.0
        return None if own.path is None else sorted(GGUFHeader.read(own.path).tensors)

    assert part(0, 1) is None
    assert part(1, 3) == ["blk.0.ffn_up.weight.lora_a", "blk.0.ffn_up.weight.lora_b"]
    last = ["blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"]
    assert part(3, 4) == [*last, "output.weight.lora_a", "output.weight.lora_b"]


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", "llama", 2)
    wide = write_tiny(tmp_path / "wide.gguf", "llama", 3, width=128, feed_forward=128)
    part = ensure_slice(model, 0, 2, cache_dir=tmp_path)

    def refused(adapter: Path, words: str) -> None:
        with pytest.raises(GGUFError, match=words):
            cut_adapter(adapter, 1.0, part, cache_dir=tmp_path)
        assert not list((tmp_path / "adapters").glob("*.gguf"))

    path = tmp_path / "lora.gguf"
    names = ["blk.1.ffn_up.weight"]
    refused(model, "is no LoRA adapter: general.type")
    refused(write_adapter(path, model, names, general_type="model"), "is no LoRA adapter: general.type")
    refused(write_adapter(path, model, names, adapter_type="x"), "is no LoRA adapter: adapter.type")
    refused(write_adapter(path, model, names, arch="qwen2"), "is for architecture 'qwen2'")
    refused(write_adapter(path, wide, ["blk.2.ffn_up.weight"]), "the model has 2 layers")
    refused(write_adapter(path, wide, names), r"the pair for 'blk\.1\.ffn_up\.weight' is \[128, 4\]")
    refused(write_adapter(path, model, ["token_embd.weight"]), "changes 'token_embd.weight'; only matrices")
    refused(write_adapter(path, model, []), "is an adapter without any tensors")
    refused(
        write_adapter(path, model, names, kind=np.int32), "lora_b' is of type I32; F32, F16, BF16, Q8_0 are"
    )
    write_adapter(path, model, names)
    path.write_bytes(path.read_bytes()[:-100])
    refused(path, "truncated")

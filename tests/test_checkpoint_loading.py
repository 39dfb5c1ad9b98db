"""Stages that make their parts of a checkpoint, from configuration and command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
import pytest
import trio

from skippy import embed
from skippy.cli.demo import DemoOptions, lora_adapter, prepare
from skippy.config import (
    ConfigError,
    KvCacheConfig,
    LoraAdapter,
    StageConfig,
    StageOptions,
    from_json_value,
    to_json_value,
)
from skippy.config.quantization import QUANTIZATIONS, parse_quantization
from skippy.embed.model_part import find_model_part
from skippy.engine.recipe import checkpoint_recipe
from skippy.models import CheckpointError, GGUFHeader, ensure_slice, file_sha256, header_path
from tests.cli.support import run_cli
from tests.support.adapters import write_adapter
from tests.support.chain_answer import chain_answer
from tests.support.checkpoints import write_checkpoint, write_imatrix
from tests.support.cluster import toy_config
from tests.support.tiny_models import write_tiny

ENDPOINTS = [f"127.0.0.1:{port}" for port in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "cache"))
    return write_checkpoint(tmp_path / "tiny", "qwen3", layers=4, width=64, feed_forward=128, shards=2)


async def answer(folder: Path, *inner: int, **settings: Any) -> str:
    """What a chain of stages says that is cut at these layers."""
    ranges = list(itertools.pairwise((0, *inner, 4)))
    return await chain_answer(ranges, [{"model_path": str(folder), **settings}] * len(ranges))


async def test_a_chain_says_what_one_stage_says(folder: Path) -> None:
    with trio.fail_after(60):
        for quantization in (None, "q8-0"):
            whole = await answer(folder, checkpoint_quantization=quantization)
            assert await answer(folder, 1, 3, checkpoint_quantization=quantization) == whole


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
async def test_a_chain_of_a_model_with_windows(family: str, folder: Path, tmp_path: Path) -> None:
    del folder  # its cache is used
    kinds = [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")]
    with trio.fail_after(60):
        for name, settings in (("m", {}), ("kinds", {"layer_types": kinds})):
            model = write_checkpoint(
                tmp_path / name, family, layers=4, width=64, feed_forward=128, config=settings
            )
            whole = await answer(model)
            assert await answer(model, 1, 3) == whole
            assert await answer(model, 2) == whole


def test_what_a_checkpoint_becomes_is_part_of_the_identity(folder: Path, tmp_path: Path) -> None:
    matrices = [write_imatrix(tmp_path / f"{n}.gguf", {"a": np.full(4, n, np.float32)}) for n in (1, 2)]
    recipes = [
        None,
        checkpoint_recipe("Q8_0"),
        checkpoint_recipe("Q4_0"),
        *(checkpoint_recipe("q4-0", matrix) for matrix in matrices),
    ]
    digests: list[str] = []
    for recipe in recipes:
        first, last = (ensure_slice(folder, *layers, recipe=recipe) for layers in ((0, 2), (2, 4)))
        assert first.source_sha256 == last.source_sha256  # stages of one model
        assert first.source_sha256 is not None
        digests.append(first.source_sha256)
    assert len(set(digests)) == len(digests)


def config(folder: Path, **settings: Any) -> Any:
    return attrs.evolve(toy_config(0, [(0, 4)], ENDPOINTS), model_path=str(folder), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"checkpoint_quantization": "Q4_K_XL"}, 'checkpoint_quantization: "Q4_K_XL" is unknown; known are'),
        ({"checkpoint_quantization": "iq2xxs"}, "checkpoint_imatrix: is missing; .* IQ2_XXS needs"),
        ({"checkpoint_imatrix": "m.dat"}, "checkpoint_imatrix: has no effect on .* preserve"),
        (
            {"checkpoint_quantization": "Q4_0", "checkpoint_imatrix": "m", "checkpoint_imatrix_sha256": "ab"},
            "checkpoint_imatrix_sha256: is 'ab', must be 64 hexadecimal digits",
        ),
        ({"checkpoint_imatrix_sha256": "a" * 64}, "checkpoint_imatrix_sha256: has no effect without"),
    ],
)
def test_keys_that_are_wrong(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(folder, **settings)


def test_names_are_taken_whatever_their_case_and_punctuation() -> None:
    assert len(QUANTIZATIONS) == 36
    for name in QUANTIZATIONS:
        for spelling in (name, name.lower(), name.replace("_", "-"), name.replace("_", "")):
            assert parse_quantization(spelling) == name
    assert {parse_quantization(name) for name in ("direct", "None", "PRESERVE")} == {"preserve"}


async def test_a_gguf_is_not_quantised(folder: Path, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model.gguf", layers=4)
    wanted = config(model, checkpoint_quantization="Q4_0")
    with pytest.raises(CheckpointError, match="checkpoint_quantization and checkpoint_imatrix are for"):
        async with embed.open_stage(wanted, transport=embed.MemoryTransport()):
            pass


async def test_another_importance_matrix(folder: Path, tmp_path: Path) -> None:
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", {})
    wanted = config(
        folder,
        checkpoint_quantization="Q4_0",
        checkpoint_imatrix=str(imatrix),
        checkpoint_imatrix_sha256="0" * 64,
    )
    found = file_sha256(imatrix)
    with pytest.raises(CheckpointError, match=f"has the SHA-256 {found}, checkpoint_imatrix_sha256 is 0000"):
        async with embed.open_stage(wanted, transport=embed.MemoryTransport()):
            pass


def test_run(folder: Path) -> None:
    options = DemoOptions(model=folder, stages=2, bind="127.0.0.1:0", checkpoint_quantization="Q8_0")
    chain = prepare(options)
    try:
        assert [child.config.model_path for child in chain.children] == [str(folder)] * 2
        assert {child.config.checkpoint_quantization for child in chain.children} == {"Q8_0"}
        assert chain.topology.model_id == "tiny"
    finally:
        for child in chain.children:
            for sock in child.sockets:
                sock.close()


def test_inspect_and_slice(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_cli(capsys, "inspect", folder, "--checkpoint-quantization", "f16").out
    assert f"model           {folder}\n" in shown
    assert "name            tiny\n" in shown
    assert "architecture    qwen3\n" in shown
    assert "weights         F16 " in shown
    out = tmp_path / "part.gguf"
    arguments = ("slice", folder, "--layers", "1:3", "--checkpoint-quantization", "q8_0")
    cached = run_cli(capsys, *arguments)
    written = run_cli(capsys, *arguments, "--out", out)
    assert written.out == f"{out}\n"
    assert out.read_bytes() == Path(cached.out.strip()).read_bytes()
    assert GGUFHeader.read(out).tensors["blk.1.ffn_up.weight"].type_name == "Q8_0"
    refused = run_cli(capsys, *arguments[:-1], "iq1_m")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: checkpoint_imatrix: is missing; checkpoint_quantization IQ1_M")


async def test_a_chain_with_an_adapter(folder: Path, tmp_path: Path) -> None:
    header = header_path(folder)
    names = [f"blk.{layer}.ffn_down.weight" for layer in range(4)]
    adapter = write_adapter(tmp_path / "lora.gguf", header, names, rank=8)
    settings: dict[str, Any] = {"lora_adapters": (LoraAdapter(path=str(adapter), scale=8.0),)}
    with trio.fail_after(60):
        whole = await answer(folder, **settings)
        assert await answer(folder, 1, 3, **settings) == whole
        assert whole != await answer(folder)


def test_lora_of_run(tmp_path: Path) -> None:
    file = tmp_path / "a:2"
    assert lora_adapter(f"{tmp_path}/b:0.5") == LoraAdapter(path=f"{tmp_path}/b", scale=0.5)
    for scale, message in (("x", "'x' behind the colon is not a number"), ("0", "scale: is 0.0, must be")):
        with pytest.raises(click.ClickException, match=message):
            lora_adapter(f"{file}:{scale}")
    file.write_bytes(b"")
    assert lora_adapter(str(file)) == LoraAdapter(path=str(file))
    chosen = config(file, lora_adapters=(lora_adapter(str(file)), LoraAdapter(path="b", scale=2.0)))
    sent = json.dumps(to_json_value(chosen))  # to the stages of `run`
    assert from_json_value(json.loads(sent), StageConfig) == chosen
    with pytest.raises(ConfigError, match="lora_adapters: has 17 entries, at most 16 are used"):
        config(file, lora_adapters=17 * (LoraAdapter(path="x"),))


def test_adapters_are_what_stages_compare_and_state_belongs_to(folder: Path, tmp_path: Path) -> None:
    names = ["blk.0.ffn_down.weight"]
    first, second = (
        LoraAdapter(path=str(write_adapter(tmp_path / f"{rank}.gguf", header_path(folder), names, rank=rank)))
        for rank in (2, 4)
    )
    cache = KvCacheConfig(mode="lookup-record", directory=str(tmp_path / "states"))

    async def identities(*adapters: LoraAdapter) -> tuple[str, bytes | None]:
        found = await find_model_part(
            config(folder, kv_cache=cache, lora_adapters=adapters), None, None, StageOptions()
        )
        return found.identity.package_id, found.identity.state_readers

    async def main() -> list[tuple[str, bytes | None]]:
        halved = attrs.evolve(second, scale=0.5)
        return [
            await identities(*adapters)
            for adapters in ((), (first,), (first, second), (second, first), (first, halved), (first, second))
        ]

    *different, again = trio.run(main)
    for column in zip(*different, strict=True):
        assert len(set(column)) == 5
    assert again == different[2]

"""Stages of one chain, each loading its part in another way: they are stages of one model, and compute it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from skippy import embed
from skippy.cli.demo import DemoOptions, prepare
from skippy.models import (
    CheckpointError,
    GGUFError,
    GGUFHeader,
    PackageError,
    check_source,
    ensure_slice,
    file_sha256,
    write_package,
)
from tests.cli.support import run_cli
from tests.support.chain_answer import chain_answer
from tests.support.checkpoints import write_checkpoint
from tests.support.cluster import toy_config
from tests.support.hub import Hub, serving
from tests.support.splitting import split_model
from tests.support.tiny_models import write_tiny

ENDPOINTS = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
RANGES = [(0, 2), (2, 4), (4, 6)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "cache"))
    return write_tiny(tmp_path / "model.gguf", layers=6)


async def answer(ranges: list[tuple[int, int]], sources: list[tuple[str, Path | str]]) -> str:
    """What a chain says whose stages load their parts so."""
    return await chain_answer(
        ranges, [{"load_mode": mode, "model_path": str(path)} for mode, path in sources]
    )


async def test_three_modes_in_one_chain(model: Path, tmp_path: Path) -> None:
    package = write_package(model, tmp_path / "package").folder
    mixed: list[tuple[str, Path | str]]
    last = ensure_slice(model, 4, 6).path
    with trio.fail_after(60):
        expected = await answer([(0, 6)], [("runtime-slice", model)])
        mixed = [("runtime-slice", model), ("layer-package", package), ("artifact-slice", last)]
        assert await answer(RANGES, mixed) == expected
        assert await answer(RANGES, [("layer-package", package)] * 3) == expected
        assert await answer([(0, 6)], [("layer-package", package)]) == expected


async def test_stages_take_their_parts_from_a_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPPY_HF_PACKAGE_CACHE", str(tmp_path / "hub"))
    package = write_package(model, tmp_path / "package").folder
    with serving(Hub()) as hub, trio.fail_after(60):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.publish("me/model", package)
        files = tmp_path / "files"
        files.mkdir()
        shutil.copy(model, files)
        hub.publish("me/file", files)
        config = attrs.evolve(
            toy_config(1, RANGES, ENDPOINTS), load_mode="layer-package", model_path="hf://me/model"
        )
        async with embed.open_stage(config, transport=embed.MemoryTransport()):
            assert [name for name in hub.names if name.startswith("layers/")] == [
                "layers/layer-00002.gguf",
                "layers/layer-00003.gguf",
            ]
        sources: list[tuple[str, Path | str]] = [("layer-package", "hf://me/model")] * 2
        expected = await answer([(0, 6)], [("runtime-slice", model)])
        assert await answer(RANGES, [*sources, ("runtime-slice", "hf://me/file")]) == expected


def test_the_fetch_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKIPPY_HF_PACKAGE_CACHE", str(tmp_path / "hub"))
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.publish("me/model", write_package(model, tmp_path / "package").folder, "v1")
        part = run_cli(capsys, "fetch", "hf://me/model:v1", "--layers", "5:6")
        assert part.code == 0, part.err
        assert "layers/layer-00000.gguf" not in hub.names
        folder = Path(part.out.strip())
        assert run_cli(capsys, "fetch", "hf://me/model:v1").out == part.out
        assert sorted(p.name for p in (folder / "layers").iterdir()) == sorted(
            p.name for p in (tmp_path / "package/layers").iterdir()
        )
        missing = run_cli(capsys, "fetch", "hf://me/model")
        assert (missing.code, missing.err) == (
            1,
            "error: hf://me/model:main: no such revision of the repository\n",
        )
        assert run_cli(capsys, "fetch", "me/model").code == 1
        hint = run_cli(capsys, "inspect", "hf://me/model")
        assert (hint.code, "`skippy fetch hf://me/model` brings it here" in hint.err) == (2, True)
        chain = prepare(DemoOptions(model="hf://me/model:v1", stages=2, bind="127.0.0.1:0"))
        assert {child.config.load_mode for child in chain.children} == {"layer-package"}
        for child in chain.children:
            for sock in child.sockets:
                sock.close()


async def test_a_damaged_part_stops_the_stage_that_needs_it(model: Path, tmp_path: Path) -> None:
    package = write_package(model, tmp_path / "package").folder
    part = package / "layers/layer-00003.gguf"
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    sources: list[tuple[str, Path | str]] = [("layer-package", package)] * 3
    with trio.fail_after(60):
        with pytest.raises(PackageError, match=r"layer-00003.gguf: is damaged or was changed"):
            await answer(RANGES, sources)
        config = attrs.evolve(
            toy_config(0, [(0, 2), (2, 6)], ENDPOINTS), load_mode="layer-package", model_path=str(package)
        )
        async with embed.open_stage(config, transport=embed.MemoryTransport()):
            pass  # it has no use for that part


@pytest.mark.parametrize("mode", ["runtime-slice", "artifact-slice", "layer-package", None])
def test_run_loads_in_the_mode_asked_for(model: Path, tmp_path: Path, mode: str | None) -> None:
    package = write_package(model, tmp_path / "package").folder
    source = model if mode in ("runtime-slice", "artifact-slice") else package
    chain = prepare(DemoOptions(model=source, stages=2, bind="127.0.0.1:0", load_mode=mode))
    try:
        configs = [child.config for child in chain.children]
        assert {config.load_mode for config in configs} == {mode or "layer-package"}
        assert {stage.load_mode for stage in chain.topology.stages} == {mode or "layer-package"}
        paths = [str(source)] * 2
        if mode == "artifact-slice":
            paths = [str(ensure_slice(model, start, end).path) for start, end in ((0, 3), (3, 6))]
        assert [config.model_path for config in configs] == paths
        assert chain.topology.model_id == "model"
    finally:
        for child in chain.children:
            for sock in child.sockets:
                sock.close()


def test_the_package_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "package"
    done = run_cli(capsys, "package", model, "--out", out, "--model-id", "mine")
    assert (done.code, done.out) == (0, f"{out}/model-package.json\n")
    manifest: dict[str, Any] = json.loads((out / "model-package.json").read_text())
    assert manifest["model_id"] == "mine"
    again = run_cli(capsys, "package", model, "--out", out)
    assert again.code == 1
    assert again.err == f"error: {out}: exists already; remove it, or name another folder\n"
    assert "6" in run_cli(capsys, "inspect", out).out
    part = run_cli(capsys, "slice", out, "--layers", "2:4")
    assert Path(part.out.strip()).read_bytes() == ensure_slice(model, 2, 4).path.read_bytes()
    refused = run_cli(capsys, "slice", out, "--layers", "2:4", "--out", tmp_path / "x.gguf")
    assert (refused.code, refused.err[:14]) == (2, "error: --out: ")


async def test_the_model_that_is_meant(model: Path, tmp_path: Path) -> None:
    """``package_ref`` instead of ``model_path``; digest and size of the whole model, however it is loaded."""
    package = write_package(model, tmp_path / "package").folder
    slices = [str(ensure_slice(model, start, end).path) for start, end in RANGES]
    digest, size = file_sha256(model), GGUFHeader.read(model).file_size
    right: dict[str, Any] = {"source_model_sha256": digest.upper()}
    sources: list[dict[str, Any]] = [
        {
            "load_mode": "layer-package",
            "model_path": None,
            "package_ref": str(package),
            "source_model_bytes": size,
        },
        {"load_mode": "runtime-slice", "model_path": str(model), "source_model_bytes": size},
        {"load_mode": "artifact-slice", "model_path": slices[2], "filter_tensors_on_load": True},
    ]
    with trio.fail_after(60):
        expected = await answer([(0, 6)], [("runtime-slice", model)])
        assert await chain_answer(RANGES, [source | right for source in sources]) == expected
        for source in sources:
            with pytest.raises(GGUFError, match=f"another model: that has SHA-256 {digest}, source_model_s"):
                await chain_answer([(0, 6)], [source | {"source_model_sha256": "0" * 64}])
        wrong = f"is of a model of {size} bytes, source_model_bytes is {size + 1}"
        for source, words in zip(sources, (wrong, wrong, "does not say how large its model is"), strict=True):
            with pytest.raises(GGUFError, match=words):
                await chain_answer([(0, 6)], [source | {"source_model_bytes": size + 1}])


def test_a_checkpoint_is_no_file_with_a_digest(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", "qwen3", layers=2, width=64, feed_forward=128)
    with pytest.raises(CheckpointError, match="is a checkpoint, and source_model_sha256 and"):
        check_source(folder, "0" * 64, None)


def test_a_model_in_several_files_has_one_digest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = split_model(model, tmp_path)
    digest = hashlib.sha256(
        b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    ).hexdigest()
    package = write_package(files[0], tmp_path / "package").folder
    for path in (files[0], package, ensure_slice(files[0], 0, 2).path):
        check_source(path, digest, None)
    check_source(package, None, sum(file.stat().st_size for file in files))

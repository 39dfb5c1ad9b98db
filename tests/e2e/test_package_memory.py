"""A stage of a layer package opens the parts with its own layers, and its memory is those layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skippy.models import GGUFHeader, write_package
from skippy.models.info import split_layer_name
from tests.support.tiny_models import write_tiny

MIB = 1 << 20
LAYERS, STAGES = 6, 3
ROOM = 32 * MIB  # for buffers, threads, and Python's own objects

STAGE = """
import json, os, sys
import trio
from skippy.config import StageConfig, StageOptions, from_json_value
from skippy.embed.model_part import find_model_part
from skippy.embed.stages import engine_options
from skippy.engine import Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo

opened = set()


def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".gguf"):
        opened.add(os.path.basename(arguments[0]))


def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


config = from_json_value(json.loads(sys.stdin.read()), StageConfig)
LlamaEngine.load(SliceInfo.from_file(sys.argv[1]), engine_options(config)).close()  # libraries are loaded now
sys.addaudithook(watch)
before = memory()
part = trio.run(find_model_part, config, None, None, StageOptions())
engine = LlamaEngine.load(part.layers, engine_options(config))
rows = bytes(4 * part.layers.hidden_size)
segment = Segment(0, 0, 1, tokens=[1] if part.layers.is_first else None,
                  activation=None if part.layers.is_first else memoryview(rows),
                  logits=int(part.layers.is_last))
engine.decode([segment], None if part.layers.is_last else memoryview(bytearray(rows)))
after = memory()
print(json.dumps({
    "opened": sorted(opened),
    "resident": after["VmRSS"] - before["VmRSS"],
    "peak": after["VmHWM"] - before["VmRSS"],
}))
"""


def load(package: Path, index: int, cache: Path, other: Path) -> dict[str, Any]:
    """Load one stage in a process of its own, behind another model; what it opened and took."""
    start, end = LAYERS // STAGES * index, LAYERS // STAGES * (index + 1)
    config = {
        "run_id": "r",
        "topology_id": "t",
        "model_id": "m",
        "stage_id": f"s{index}",
        "stage_index": index,
        "layer_start": start,
        "layer_end": end,
        "load_mode": "layer-package",
        "model_path": str(package),
        "bind_addr": "127.0.0.1:0",
        "ctx_size": 64,
        "lane_count": 1,
        "n_threads": 1,
        "n_batch": 32,
        "n_ubatch": 32,
    }
    if index:
        config["upstream"] = {"stage_id": "u", "stage_index": index - 1, "endpoint": "127.0.0.1:1"}
    if index < STAGES - 1:
        config["downstream"] = {"stage_id": "d", "stage_index": index + 1, "endpoint": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", STAGE, str(other)],
        input=json.dumps(config),
        env={**os.environ, "SKIPPY_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory a process has")
def test_three_stages_of_a_package(tmp_path: Path) -> None:
    model = write_tiny(
        tmp_path / "m.gguf", "llama", LAYERS, width=512, heads=8, feed_forward=2048, tied=False
    )
    header = GGUFHeader.read(model)
    sizes = [0] * LAYERS
    for tensor in header.tensors.values():
        place = split_layer_name(tensor.name)
        if place is not None:
            sizes[place[0]] += tensor.nbytes
    package = write_package(model, tmp_path / "package").folder
    parts = {path.name for path in package.rglob("*.gguf")}
    other = write_tiny(tmp_path / "other.gguf", "llama", 1)
    model.unlink()
    assert sum(sizes) > 1.4 * (sum(sizes) / STAGES + ROOM)  # else the bounds below say nothing
    for index in range(STAGES):
        found = load(package, index, tmp_path / f"cache-{index}", other)
        layers = range(LAYERS // STAGES * index, LAYERS // STAGES * (index + 1))
        own = sum(sizes[layer] for layer in layers)
        shared = {"metadata.gguf", *(["embeddings.gguf"] if index == 0 else [])}
        shared |= {"output.gguf"} if index == STAGES - 1 else set()
        assert parts & set(found["opened"]) == shared | {f"layer-{layer:05}.gguf" for layer in layers}
        assert own * 0.8 < found["resident"] < own + ROOM
        assert found["peak"] < own + ROOM

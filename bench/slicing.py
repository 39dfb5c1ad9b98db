"""How fast slices are written, against ``cp`` of as many bytes; how fast a large vocabulary's header opens.

    python -m bench.slicing [--size-gb 2] [--rounds 7] [--folder DIR]

A llama-like model of random bytes is made in the folder, with a vocabulary of 128,000 tokens; then its three
thirds are written, and files of the same sizes are copied with ``cp`` and synced, in turn within each round.
Every file is removed before the next is written. The model's digest is given: a stage remembers it, and
``cp`` makes none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
import numpy as np
from gguf import GGUFWriter, TokenType

from skippy.models import read_gguf, write_slice
from skippy.topology import plan_even

from .common import Report, Spread, in_turn, machine, parser, ratios, table

STAGES = 3
LAYERS = 24
VOCABULARY = 128_000
WIDTH = 1024
TARGET = 0.8
SHA256 = "0" * 64
ARMS = ("skippy slice", "cp")


@attrs.frozen
class Settings:
    gigabytes: float
    rounds: int
    folder: Path
    out: Path


def make_model(path: Path, gigabytes: float) -> None:
    """Layers of one matrix each, F16, that have so many bytes together."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(4 * WIDTH)
    writer.add_head_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{index}" for index in range(VOCABULARY)])
    writer.add_token_types([TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges([f"to ken{index}" for index in range(VOCABULARY)])
    chance = np.random.default_rng(1)
    rows = max(1, int(gigabytes * 1e9 / LAYERS / WIDTH / 2))
    piece = chance.integers(0, 2**15, (rows, WIDTH), np.uint16).view(np.float16)
    writer.add_tensor("token_embd.weight", piece[:VOCABULARY])
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", piece)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def slice_secs(model: Path, folder: Path) -> float:
    """Seconds for all three slices, one after the other, each synced."""
    taken = 0.0
    for part in plan_even(LAYERS, STAGES):
        began = time.perf_counter()
        write_slice(read_gguf(model), folder / "slice", part.start, part.end, source_sha256=SHA256)
        taken += time.perf_counter() - began
        (folder / "slice").unlink()
    return taken


def copy_secs(parts: list[Path], folder: Path) -> float:
    """Seconds for copies of files with the same bytes, each synced."""
    taken = 0.0
    for part in parts:
        began = time.perf_counter()
        subprocess.run(["cp", "--sparse=never", "--reflink=never", part, folder / "copy"], check=True)
        with open(folder / "copy", "rb") as file:
            os.fsync(file.fileno())
        taken += time.perf_counter() - began
        (folder / "copy").unlink()
    return taken


def header_secs(model: Path) -> float:
    began = time.perf_counter()
    read_gguf(model)
    return time.perf_counter() - began


def run(settings: Settings) -> None:
    with tempfile.TemporaryDirectory(dir=settings.folder) as name:
        folder = Path(name)
        model = folder / "model.gguf"
        make_model(model, settings.gigabytes)
        parts = [folder / f"part{index}" for index in range(STAGES)]
        for part, path in zip(plan_even(LAYERS, STAGES), parts, strict=True):
            write_slice(read_gguf(model), path, part.start, part.end, source_sha256=SHA256)
        size = sum(path.stat().st_blocks * 512 for path in parts)
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        headers = []
        for number in range(settings.rounds + 1):
            for arm in in_turn(ARMS, number):
                taken = slice_secs(model, folder) if arm == ARMS[0] else copy_secs(parts, folder)
                if number:  # the first one warms up
                    rates[arm].append(size / taken / 1e9)
            headers.append(1000 * header_secs(model))
    out = Report(settings.out, "slicing")
    out.add(f"three slices, {size / 1e9:.2f} GB in all, {settings.rounds} rounds, {machine()}")
    rows = [[arm, Spread.of(rates[arm]).show(2)] for arm in ARMS]
    out.add(table(["", "GB/s"], rows))
    out.add(f"Ratio {ratios(rates[ARMS[0]], rates[ARMS[1]]).show()}; target: at least {TARGET}.")
    out.add(
        f"Header with {VOCABULARY:,} tokens and merges: {Spread.of(headers).show(1)} ms; target: under 200."
    )
    out.finish({"rates": rates, "headers": headers})


def main() -> int:
    made = parser(__doc__, rounds=7)
    made.add_argument("--size-gb", type=float, default=2.0, help="of all layers; default: 2")
    made.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure; default: here")
    args = made.parse_args()
    run(Settings(args.size_gb, args.rounds, args.folder, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

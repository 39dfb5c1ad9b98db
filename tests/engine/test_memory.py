"""What is particular to llama.cpp's memory: its state format, every type of cache, its sizes."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from skippy.engine import EngineError, EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.engine.llama.layout import Layout, Rows
from skippy.engine.llama.native import _router, api
from skippy.engine.llama.state import HEADER_BYTES, checksum, rewrite
from skippy.engine.options import TapChoice
from skippy.models import BoundaryPart, SliceInfo
from tests.support.tiny_models import write_tiny, write_tiny_windowed

from .chains import Chain
from .conftest import OpenModel

TOKENS = [(index * 37 + 11) % 250 for index in range(60)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 values, which quantised caches need."""
    return write_tiny(tmp_path_factory.mktemp("wide") / "wide.gguf", layers=3, width=128)


def _llama(chain: Chain) -> LlamaEngine:
    assert isinstance(chain.last, LlamaEngine)
    return chain.last


def _add(cells: np.ndarray[Any, np.dtype[np.uint8]], kind: int) -> float:
    """Change one value of a row by a known amount, the difference to expect."""
    if kind == 8:  # q8_0: blocks of a f16 scale and 32 bytes
        scale = float(cells[:2].view(np.float16)[0])
        cells[2:].view(np.int8)[5] += 3 if cells[2:].view(np.int8)[5] < 100 else -3
        return abs(3 * scale)
    if kind == 30:  # bf16
        numbers = cells.view(np.uint16)
        before = (numbers[5:6].astype(np.uint32) << 16).view(np.float32)[0]
        numbers[5] = 0x4080  # 4.0
        return abs(4.0 - float(before))
    numbers = cells.view(np.float32 if kind == 0 else np.float16)
    before = float(numbers[5])
    numbers[5] = 4.0
    return abs(4.0 - before)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize(
    ("types", "flash"),
    [
        (("f32", "f32"), "disabled"),
        (("f16", "f16"), "disabled"),
        (("q8_0", "bf16"), "disabled"),
        (("f16", "f16"), "enabled"),
        (("bf16", "f32"), "enabled"),
        (("q8_0", "q8_0"), "enabled"),
    ],
)
def test_the_difference_is_that_of_the_values(
    types: tuple[str, str], flash: str, unified: bool, wide: Path, open_model: OpenModel
) -> None:
    chain = open_model(
        wide, cache_type_k=types[0], cache_type_v=types[1], flash_attn=flash, kv_unified=unified
    )
    engine = _llama(chain)
    chain.feed((1, TOKENS[:3]))
    chain.feed((2, TOKENS[:20]))
    state = engine.export_state(2)
    layout = Layout.of(state[HEADER_BYTES:], recurrent=False)
    assert layout is not None
    (section,) = layout.sections
    assert section.positions.tolist() == list(range(20))
    assert len(section.rows) == 6
    assert bool(section.rows[-1].element_bytes) == (flash == "disabled")
    for rows in section.rows:
        changed = bytearray(state)
        expected = _change(memoryview(changed)[HEADER_BYTES:], rows, cell=7, count=20)
        engine.import_state(3, engine._memory._state.seal(memoryview(changed), 20))
        assert engine.difference(2, 3, 7) == 0.0
        assert engine.difference(2, 3, 8) == engine.difference(3, 2, 20) == expected > 0.0
        engine.drop(3)


def _change(body: memoryview, rows: Rows, cell: int, count: int) -> float:
    data = np.frombuffer(body, np.uint8, count * rows.row_bytes, rows.start)
    if not rows.element_bytes:
        return _add(data.reshape(count, rows.row_bytes)[cell], rows.kind)
    table = data.reshape(-1, count, rows.element_bytes)
    row = np.ascontiguousarray(table[:, cell]).reshape(-1)
    expected = _add(row, rows.kind)
    table[:, cell] = row.reshape(-1, rows.element_bytes)
    return expected


def test_not_a_number_is_infinitely_far(wide: Path, open_model: OpenModel) -> None:
    chain = open_model(wide)
    engine = _llama(chain)
    chain.feed((0, TOKENS[:5]))
    state = bytearray(engine.export_state(0))
    layout = Layout.of(memoryview(state)[HEADER_BYTES:], recurrent=False)
    assert layout is not None
    start = HEADER_BYTES + layout.sections[0].rows[0].start
    state[start : start + 2] = b"\xff\xff"
    engine.import_state(1, engine._memory._state.seal(memoryview(state), 5))
    assert engine.difference(0, 1, 5) == float("inf")
    engine.drop(0)
    engine.import_state(0, engine.export_state(1))
    assert engine.difference(0, 1, 5) == 0.0  # equal bytes are equal


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_unified": True},
        {"kv_unified": True, "max_sequences": 200, "cells": 300},
        {"flash_attn": "disabled"},
        {"cache_type_k": "q8_0", "cache_type_v": "q4_0", "max_sequences": 7},
        {"cache_type_k": "f32", "cache_type_v": "bf16", "context_length": 700},
    ],
    ids=str,
)
def test_sizes_are_what_llama_cpp_says(options: dict[str, Any], wide: Path, open_model: OpenModel) -> None:
    with _buffer_sizes() as sizes:
        info = open_model(wide, **options).last.info
    assert info.kv_bytes == pytest.approx(sum(sizes), abs=2**20 * 0.0051 * len(sizes))
    assert info.position_bytes > 0


class _buffer_sizes:
    """Bytes of the caches that llama.cpp allocates meanwhile, by its own log."""

    def __enter__(self) -> list[float]:
        found: list[float] = []

        def receive(level: int, text: bytes, user_data: object) -> None:
            sizes = re.findall(rb"(?:KV|RS) buffer size = +([\d.]+) MiB", text)
            found.extend(float(size) * 2**20 for size in sizes)

        self._callback = api.llama_log_callback(receive)
        api.llama_log_set(self._callback, ctypes.c_void_p(0))
        return found

    def __exit__(self, *_: object) -> None:
        api.llama_log_set(_router.callback, ctypes.c_void_p(0))


def test_the_checksum_tells_any_change() -> None:
    random = np.random.default_rng(0)
    body = bytearray(random.integers(0, 256, 300_007, dtype=np.uint8).tobytes())
    seen = {checksum(memoryview(body))}
    for place in (0, 7, 40_000, 262_143, 262_144, 300_006):
        for bit in (1, 128):
            changed = bytearray(body)
            changed[place] ^= bit
            seen.add(checksum(memoryview(changed)))
    row = 32_768
    swapped = body[row : 2 * row] + body[:row] + body[2 * row :]
    for other in (swapped, body[8:16] + body[:8] + body[16:], body[:-1], body + b"\0", body[8:]):
        seen.add(checksum(memoryview(other)))
    assert len(seen) == 18


def test_layouts_of_damaged_state() -> None:
    assert Layout.of(memoryview(b""), recurrent=True) is None
    random = np.random.default_rng(1)
    head = np.array([0xAF143CD8, 0], "<u4").tobytes()
    for size in range(0, 400, 7):
        body = head + random.integers(0, 2, size, dtype=np.uint8).tobytes()
        for recurrent in (False, True):
            Layout.of(memoryview(body), recurrent=recurrent)  # whatever it is: no other exception
    empty = head + np.array([1, 0] * 200, "<u4").tobytes()
    assert Layout.of(memoryview(empty), recurrent=False) is None


@pytest.mark.parametrize("tap", ["c", "python"])
@pytest.mark.parametrize("start", [0, 1])
def test_copies_of_windowed_caches_on_inner_stages(start: int, tap: TapChoice, tmp_path: Path) -> None:
    """A whole model as a stage with layers behind it, perhaps before it: the copy is completed there, too."""
    whole = SliceInfo.from_file(write_tiny_windowed(tmp_path / "windowed.gguf"))
    info = attrs.evolve(
        whole,
        layer_start=start,
        layer_end=start + 8,
        layer_count=start + 9,
        outputs=(BoundaryPart("l_out-7", whole.hidden_size),),
    )
    engine = LlamaEngine.load(info, EngineOptions(n_threads=1, context_length=256, tap=tap))
    rows = np.random.default_rng(0).normal(0, 1, (60, whole.hidden_size)).astype(np.float32)

    def run(sequence: int, first: int, last: int) -> bytes:
        output = bytearray((last - first) * whole.hidden_size * 4)
        values = None if engine.info.is_first else rows[first:last].data.cast("B")
        tokens = TOKENS[first:last] if engine.info.is_first else None
        engine.decode(
            [Segment(sequence, first, last - first, tokens=tokens, activation=values)], memoryview(output)
        )
        return bytes(output)

    run(0, 0, 50)
    engine.copy(0, 2, 30)
    engine.copy(0, 3)
    expected = run(0, 50, 60)
    assert run(3, 50, 60) == expected
    engine.trim(0, 30)
    assert run(2, 30, 40) == run(0, 30, 40)
    engine.close()


@pytest.mark.parametrize("unified", [False, True])
def test_state_of_an_unknown_format_is_left_alone(
    unified: bool, wide: Path, open_model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = open_model(wide, kv_unified=unified).last.info
    monkeypatch.setattr(Layout, "of", lambda body, recurrent: None)
    chain = open_model(wide, kv_unified=unified)
    info = chain.last.info
    assert (info.can_export, info.can_trim_state, info.can_copy) == (False, False, unified)
    assert 0 <= info.position_bytes - known.position_bytes <= 12
    chain.feed((0, TOKENS[:20]))
    for call in (lambda: chain.last.export_state(0), lambda: chain.last.difference(0, 0, 20)):
        with pytest.raises(EngineError, match="format that is not known"):
            call()
    if unified:
        chain.last.copy(0, 1, 7)
    else:
        with pytest.raises(EngineError, match="cannot be copied"):
            chain.last.copy(0, 1, 7)
    assert chain.last.length(1) == (7 if unified else 0)


def _section(cells: int, rows: list[int], transposed: bool, values: bool) -> bytes:
    """A cache of one stream, as llama.cpp writes it."""
    words: list[bytes] = [struct.pack("<II", 1, cells)]
    words += [struct.pack("<iii", position, 1, 0) for position in range(cells)]
    words.append(struct.pack("<II", transposed, len(rows)))
    for is_value in (False, True) if values else (False,):
        for row in rows:
            if is_value and transposed:
                words.append(struct.pack("<iII", 1, 2, row // 2))
            else:
                words.append(struct.pack("<iQ", 1, row))
            words.append(bytes([row % 251]) * row * cells)
    return b"".join(words)


@pytest.mark.parametrize("values", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_without_values(transposed: bool, values: tuple[bool, bool]) -> None:
    """Models with latent attention keep keys only; those with an indexer have a second cache for it."""
    rows = ([64, 96], [32])
    sections = [_section(9, *case) for case in zip(rows, (transposed, transposed), values, strict=True)]
    body = struct.pack("<II", 0xAF143CD8, 0) + b"".join(sections)
    layout = Layout.of(memoryview(body), recurrent=False)
    assert layout is not None
    assert layout.streams == 1
    assert [section.positions.tolist() for section in layout.sections] == [list(range(9))] * 2
    for section, expected, with_values in zip(layout.sections, rows, values, strict=True):
        assert [part.row_bytes for part in section.rows] == expected * (2 if with_values else 1)
        for part in section.rows:
            assert set(body[part.start : part.start + 9 * part.row_bytes]) == {part.row_bytes % 251}
    shortened = rewrite(memoryview(body), layout, length=4, streams=3).data
    short = Layout.of(shortened, recurrent=False)
    assert short is not None
    assert short.streams == 3
    assert [len(section.positions) for section in short.sections] == [4, 4]
    assert [section.row_bytes for section in short.sections] == [s.row_bytes for s in layout.sections]

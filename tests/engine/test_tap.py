"""Both boundary taps, driven by hand through their callback with made-up tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from skippy.engine import EngineError, ModelLoadError
from skippy.engine.tap import EvalCallback, Point, PythonTap, Tap, compiled_library, create_tap

REPOSITORY = Path(__file__).resolve().parents[2]


class Tensor(ctypes.Structure):
    """Stands for a ggml_tensor: the type comes first there too; the rest is for the functions below."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("name", ctypes.c_char * 64),
        ("data", ctypes.c_char * 64),
        ("size", ctypes.c_size_t),
        ("contiguous", ctypes.c_bool),
    ]


def tensor(
    name: bytes = b"l_out-3", data: bytes = b"A" * 16, kind: int = 0, contiguous: bool = True
) -> Tensor:
    return Tensor(kind, name, data, len(data), contiguous)


def get_name(pointer: int) -> int:
    return pointer + Tensor.name.offset


def nbytes(pointer: int) -> int:
    return int(Tensor.from_address(pointer).size)


def is_contiguous(pointer: int) -> bool:
    return bool(Tensor.from_address(pointer).contiguous)


def tensor_set(pointer: int, source: int, offset: int, size: int) -> None:
    ctypes.memmove(pointer + Tensor.data.offset + offset, source, size)


def tensor_get(pointer: int, target: int, offset: int, size: int) -> None:
    ctypes.memmove(target, pointer + Tensor.data.offset + offset, size)


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
CALLBACKS = {
    "ggml_get_name": ctypes.CFUNCTYPE(_POINTER, _POINTER)(get_name),
    "ggml_nbytes": ctypes.CFUNCTYPE(_SIZE, _POINTER)(nbytes),
    "ggml_is_contiguous": ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER)(is_contiguous),
    "ggml_backend_tensor_get": ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _SIZE, _SIZE)(tensor_get),
    "ggml_backend_tensor_set": ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _SIZE, _SIZE)(tensor_set),
}
POINTS = [Point("l_out-3", 8)]
FUNCTIONS = {name: ctypes.cast(function, _POINTER).value or 0 for name, function in CALLBACKS.items()}


@pytest.fixture(params=["c", "python"])
def tap(request: pytest.FixtureRequest) -> Tap:
    made = create_tap(FUNCTIONS, POINTS, request.param)
    assert made.kind == request.param
    return made


def evaluate(tap: Tap, value: Tensor, ask: bool) -> bool:
    return bool(EvalCallback(tap.callback)(ctypes.addressof(value), ask, tap.user_data))


def armed(tap: Tap, size: int) -> ctypes.Array[ctypes.c_char]:
    buffer = ctypes.create_string_buffer(b"." * size, size + 8)
    tap.arm(0, ctypes.addressof(buffer), size)
    return buffer


def test_only_the_whole_name_matches(tap: Tap) -> None:
    for name, wanted in ((b"l_out-3", True), (b"l_out-30", False), (b"l_out-3 (view)", False), (b"", False)):
        assert evaluate(tap, tensor(name), ask=True) is wanted


def test_ubatches_are_appended_and_the_graph_stops(tap: Tap) -> None:
    for _ in range(2):
        buffer = armed(tap, 40)
        assert evaluate(tap, tensor(data=b"A" * 16), ask=False) is False
        assert evaluate(tap, tensor(data=b"B" * 24), ask=False) is False
        tap.finish()
        assert buffer.raw[:40] == b"A" * 16 + b"B" * 24


def test_too_much_is_not_written(tap: Tap) -> None:
    buffer = armed(tap, 24)
    assert evaluate(tap, tensor(data=b"A" * 16), ask=False) is False
    assert evaluate(tap, tensor(data=b"B" * 16), ask=False) is False
    with pytest.raises(EngineError, match="more rows"):
        tap.finish()
    assert buffer.raw[:24] == b"A" * 16 + b"." * 8


def test_too_little_is_reported(tap: Tap) -> None:
    buffer = armed(tap, 32)
    evaluate(tap, tensor(data=b"A" * 16), ask=False)
    assert buffer.raw[:16] == b"A" * 16
    with pytest.raises(EngineError, match="gave 16 bytes, expected 32"):
        tap.finish()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(kind=1), "not f32"),
        (tensor(contiguous=False), "not contiguous"),
        (tensor(data=b"A" * 12), "whole rows"),
    ],
)
def test_what_is_no_boundary_is_refused(tap: Tap, value: Tensor, message: str) -> None:
    buffer = armed(tap, 16)
    assert evaluate(tap, value, ask=False) is False
    with pytest.raises(EngineError, match=message):
        tap.finish()
    assert buffer.raw[:16] == b"." * 16
    buffer = armed(tap, 16)
    evaluate(tap, tensor(), ask=False)
    tap.finish()
    assert buffer.raw[:16] == b"A" * 16


@pytest.mark.parametrize("kind", ["c", "python"])
def test_what_is_written_is_read_and_the_graph_goes_on_to_the_last_reader(
    kind: Literal["c", "python"],
) -> None:
    points = [Point("bank", 8, writes=True), Point("in", 8, writes=True), Point("bank", 8), Point("out", 8)]
    tap = create_tap(FUNCTIONS, points, kind)
    buffers = [ctypes.create_string_buffer(text, 24) for text in (b"A" * 24, b"B" * 24, b"." * 24, b"." * 24)]
    for index, buffer in enumerate(buffers):
        tap.arm(index, ctypes.addressof(buffer), 24)
    for size in (16, 8):  # two ubatches
        bank, entry, out = (tensor(name, data=b"x" * size) for name in (b"bank", b"in", b"out"))
        assert [evaluate(tap, value, ask=True) for value in (bank, entry, out)] == [True] * 3
        assert [evaluate(tap, value, ask=False) for value in (bank, entry, out)] == [True, True, False]
        assert (bank.data[:size], entry.data[:size], out.data[:size]) == (
            b"A" * size,
            b"B" * size,
            b"x" * size,
        )
    tap.finish()
    assert [buffer.raw for buffer in buffers[2:]] == [b"A" * 24, b"x" * 24]


@pytest.mark.parametrize("kind", ["c", "python"])
def test_without_a_reader_the_graph_goes_on_to_its_end(kind: Literal["c", "python"]) -> None:
    tap = create_tap(FUNCTIONS, [Point("in", 8, writes=True)], kind)
    buffer = ctypes.create_string_buffer(b"A" * 16, 16)
    tap.arm(0, ctypes.addressof(buffer), 16)
    entry = tensor(b"in", data=b"x" * 16)
    assert evaluate(tap, entry, ask=False) is True
    assert evaluate(tap, tensor(b"in", data=b"x" * 16), ask=False) is False
    with pytest.raises(EngineError, match="more rows than the input buffer"):
        tap.finish()
    tap.arm(0, ctypes.addressof(buffer), 16)
    assert evaluate(tap, tensor(b"in", data=b"x" * 8), ask=False) is True
    with pytest.raises(EngineError, match="in took 8 bytes, expected 16"):
        tap.finish()


def test_nothing_is_written_after_finish(tap: Tap) -> None:
    buffer = armed(tap, 16)
    evaluate(tap, tensor(), ask=False)
    tap.finish()
    evaluate(tap, tensor(data=b"B" * 16), ask=False)
    assert buffer.raw[:16] == b"A" * 16


def test_environment_decides_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SKIPPY_TAP", raising=False)
    with caplog.at_level("INFO", logger="skippy"):
        assert create_tap(FUNCTIONS, POINTS).kind == "c"
        monkeypatch.setenv("SKIPPY_TAP", "python")
        assert create_tap(FUNCTIONS, POINTS).kind == "python"
        assert create_tap(FUNCTIONS, POINTS, "c").kind == "c"
    assert [(line.msg["event"], line.msg["tap"]) for line in caplog.records] == [
        ("boundary tap", "c"),
        ("boundary tap", "python"),
        ("boundary tap", "c"),
    ]
    monkeypatch.setenv("SKIPPY_TAP", "rust")
    with pytest.raises(ModelLoadError, match="SKIPPY_TAP"):
        create_tap(FUNCTIONS, POINTS)


def test_fallback_when_nothing_was_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SKIPPY_TAP", raising=False)
    broken = tmp_path / "_tap.so"
    broken.write_bytes(b"not a library")
    for path in (None, broken):
        monkeypatch.setattr("skippy.engine.tap.compiled_library", lambda path=path: path)
        assert isinstance(create_tap(FUNCTIONS, POINTS), PythonTap)
        with pytest.raises(ModelLoadError, match="not usable"):
            create_tap(FUNCTIONS, POINTS, "c")


@pytest.mark.parametrize("node", ["", "x" * 64])
def test_node_names_that_do_not_fit(node: str) -> None:
    with pytest.raises(ModelLoadError, match="node name"):
        create_tap(FUNCTIONS, [Point(node, 8)])


def test_the_tap_builds_with_a_compiler_and_is_left_out_without(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="building the package needs setuptools")
    assert compiled_library() is not None
    # Without pyproject.toml, whose form may need a newer setuptools than the one installed for tests.
    source = tmp_path / "source"
    (source / "skippy" / "engine").mkdir(parents=True)
    for name in ("setup.py", "skippy/engine/_tap.c"):
        shutil.copy(REPOSITORY / name, source / name)
    for compiler, built in ((os.environ.get("CC", "cc"), 1), ("/nonexistent/cc", 0)):
        target = tmp_path / str(built)
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", target],
            cwd=source,
            env={**os.environ, "CC": compiler},
            check=True,
            capture_output=True,
        )
        assert len(list(target.glob("skippy/engine/_tap*"))) == built
        shutil.rmtree(source / "build", ignore_errors=True)

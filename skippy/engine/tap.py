"""The boundary tap: overwrites and reads named nodes of the compute graph while llama.cpp runs it.

Two implementations with one behaviour: a small C library (no Python in the loop, no GIL) and a ctypes
callback written in Python for machines without a compiler. Both copy straight from and into the caller's
buffers, refuse what would not fit, and stop the graph behind the last node.
"""

from __future__ import annotations

import abc
import ctypes
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from skippy.telemetry import get_logger

from .base import EngineError, ModelLoadError
from .options import TapChoice

TAP_ENV: Final = "SKIPPY_TAP"

GGML_FUNCTIONS: Final = (
    "ggml_get_name",
    "ggml_nbytes",
    "ggml_is_contiguous",
    "ggml_backend_tensor_get",
    "ggml_backend_tensor_set",
)
"""What the tap calls in ggml; found by the caller in the library llama-cpp-python ships."""

EvalCallback: Final = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
"""ggml's ``ggml_backend_sched_eval_callback``: (tensor, ask, user data) -> bool."""

_NODE_NAME_SIZE: Final = 64
_MAX_POINTS: Final = 64
_NO_INPUT: Final = 5
_FAULTS: Final = {
    1: "the boundary node is not f32",
    2: "the boundary node is not contiguous",
    3: "the boundary node does not consist of whole rows",
    4: "the boundary node has more rows than the output buffer",
    _NO_INPUT: "the boundary node has more rows than the input buffer",
}

_log = get_logger("skippy.engine")


@attrs.frozen(slots=True)
class Point:
    """One node that the tap reads, or overwrites.

    Attributes:
        node: its whole name.
        row_bytes: bytes of one row of it.
        writes: it is overwritten.
    """

    node: str
    row_bytes: int
    writes: bool = False


class _PointStruct(ctypes.Structure):
    """Mirror of ``struct skippy_point`` in _tap.c."""

    _fields_ = [
        ("node", ctypes.c_char * _NODE_NAME_SIZE),
        ("row_bytes", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("writes", ctypes.c_int32),
        ("status", ctypes.c_int32),
    ]


class _TapStruct(ctypes.Structure):
    """Mirror of ``struct skippy_tap`` in _tap.c."""

    _fields_ = [
        ("get_name", ctypes.c_void_p),
        ("nbytes", ctypes.c_void_p),
        ("is_contiguous", ctypes.c_void_p),
        ("tensor_get", ctypes.c_void_p),
        ("tensor_set", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("last", ctypes.c_int32),
        ("points", _PointStruct * _MAX_POINTS),
    ]


class Tap(abc.ABC):
    """Moves the boundaries of one context. Used by the engine's thread only.

    Where several points name one node they act on it in their order: what was written is read. The graph
    stops behind the last point that reads, and goes on to its end if none does.

    Attributes:
        kind: ``"c"`` or ``"python"``.
        callback: address of the eval callback, for ``llama_context_params.cb_eval``.
        user_data: its user data pointer. Both live as long as this object.
    """

    kind: str
    callback: int
    user_data: int

    def __init__(self, points: Sequence[Point]) -> None:
        self._state = _TapStruct()
        self._state.count = len(points)
        self._state.last = max((i for i, point in enumerate(points) if not point.writes), default=-1)
        self._armed = self._state.points[: len(points)]  # the structs themselves, not copies
        for state, point in zip(self._armed, points, strict=True):
            state.node, state.row_bytes, state.writes = point.node.encode(), point.row_bytes, point.writes

    def arm(self, index: int, address: int, capacity: int) -> None:
        """Before a decode: rows of a point are at ``address``, or go there, ``capacity`` bytes in all."""
        state = self._armed[index]
        state.data, state.capacity, state.used, state.status = address, capacity, 0, 0

    def finish(self) -> None:
        """After a decode: forget the buffers.

        Raises:
            EngineError: fewer bytes than its ``capacity`` were moved at a point, or something came that could
                not be taken.
        """
        fault = None
        for state in self._armed:
            status, used, capacity, node = state.status, state.used, state.capacity, state.node.decode()
            state.data, state.capacity = None, 0
            if fault is None and status:
                fault = f"{_FAULTS.get(status, 'the boundary tap failed')} (node {node})"
            elif fault is None and used != capacity:
                took = "took" if state.writes else "gave"
                fault = f"the boundary node {node} {took} {used} bytes, expected {capacity}"
        if fault is not None:
            raise EngineError(fault)


class CTap(Tap):
    """The tap compiled from ``_tap.c``."""

    kind = "c"

    def __init__(self, library: ctypes.CDLL, functions: Mapping[str, int], points: Sequence[Point]) -> None:
        super().__init__(points)
        library.skippy_tap_size.restype = ctypes.c_size_t
        if library.skippy_tap_size() != ctypes.sizeof(_TapStruct):
            raise OSError("the compiled boundary tap is of another version")
        self._library = library
        for (field, *_), name in zip(_TapStruct._fields_, GGML_FUNCTIONS, strict=False):
            setattr(self._state, field, functions[name])
        self.callback = ctypes.cast(library.skippy_tap_eval, ctypes.c_void_p).value or 0
        self.user_data = ctypes.addressof(self._state)


class PythonTap(Tap):
    """The fallback: the same steps as ``_tap.c``, in a ctypes callback."""

    kind = "python"

    def __init__(self, functions: Mapping[str, int], points: Sequence[Point]) -> None:
        super().__init__(points)

        def bind(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            return ctypes.CFUNCTYPE(result, *arguments)(functions[name])

        self._get_name = bind("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._nbytes = bind("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self._is_contiguous = bind("ggml_is_contiguous", ctypes.c_bool, ctypes.c_void_p)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._tensor_get = bind("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        self._tensor_set = bind("ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self._names = frozenset(point.node.encode() for point in points)
        self._function = EvalCallback(self._evaluate)
        self.callback = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.user_data = 0

    def _evaluate(self, tensor: int, ask: bool, _user_data: int | None) -> bool:
        name = self._get_name(tensor)
        if ask:
            return name in self._names
        wanted, stop = False, False
        for index, point in enumerate(self._armed):
            if point.node != name:
                continue
            wanted = True
            if not point.status:
                point.status = self._move_rows(point, tensor)
            stop = stop or index == self._state.last or bool(point.status)
        return wanted and not stop

    def _move_rows(self, point: _PointStruct, tensor: int) -> int:
        # The type is the first member of ggml_tensor; 0 is F32.
        if ctypes.c_int32.from_address(tensor).value != 0:
            return 1
        if not self._is_contiguous(tensor):
            return 2
        size = self._nbytes(tensor)
        if size % point.row_bytes:
            return 3
        if not point.data or size > point.capacity - point.used:
            return _NO_INPUT if point.writes else 4
        move = self._tensor_set if point.writes else self._tensor_get
        move(tensor, point.data + point.used, 0, size)
        point.used += size
        return 0


def compiled_library() -> pathlib.Path | None:
    """Path of the C tap built with the package, or None when it was not built."""
    folder = pathlib.Path(__file__).parent
    found = sorted(
        path for pattern in ("_tap*.so", "_tap*.pyd", "_tap*.dylib") for path in folder.glob(pattern)
    )
    return found[-1] if found else None


def abort_function() -> int | None:
    """Address of the abort callback in the compiled library, or None without a usable one."""
    path = compiled_library()
    if path is None:
        return None
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).skippy_aborts, ctypes.c_void_p).value
    except (OSError, AttributeError):  # of another platform or version, which create_tap reports
        return None


def create_tap(functions: Mapping[str, int], points: Sequence[Point], choice: TapChoice = "auto") -> Tap:
    """A tap for one context. Logs one line that says which implementation is in use.

    Args:
        functions: addresses of :data:`GGML_FUNCTIONS`.
        points: what it overwrites and reads, in the order of :meth:`Tap.arm`.
        choice: with ``"auto"`` the environment variable ``SKIPPY_TAP`` (``c`` or ``python``) decides, else C
            is taken when it was built.

    Raises:
        ModelLoadError: C was asked for and was not built, or a choice or node name that does not exist.
    """
    for point in points:
        size = len(point.node.encode())
        if not 0 < size < _NODE_NAME_SIZE:
            raise ModelLoadError(f"boundary node name of {size} bytes, at most {_NODE_NAME_SIZE - 1} fit")
    if not 0 < len(points) <= _MAX_POINTS:
        raise ModelLoadError(f"{len(points)} boundary nodes, 1 to {_MAX_POINTS} can be tapped")
    wanted = choice
    if choice == "auto" and (value := os.environ.get(TAP_ENV, "")):
        if value not in ("auto", "c", "python"):
            raise ModelLoadError(f"{TAP_ENV} must be auto, c or python, not {value!r}")
        wanted = value  # type: ignore[assignment]
    nodes = " ".join(point.node for point in points)
    if wanted != "python":
        path = compiled_library()
        reason = "not built"
        if path is not None:
            try:
                tap = CTap(ctypes.CDLL(str(path)), functions, points)
            except (OSError, AttributeError) as error:
                reason = str(error)
            else:
                _log.info("boundary tap", tap="c", node=nodes)
                return tap
        if wanted == "c":
            raise ModelLoadError(f"the C boundary tap is not usable: {reason}")
        _log.info("boundary tap", tap="python", node=nodes, c_tap=reason)
    else:
        _log.info("boundary tap", tap="python", node=nodes)
    return PythonTap(functions, points)

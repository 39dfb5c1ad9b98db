"""The boundary tap: reads one named node of the compute graph while llama.cpp runs it.

Two implementations with one behaviour: a small C library (no Python in the loop, no GIL) and a ctypes
callback written in Python for machines without a compiler. Both copy straight into the caller's buffer,
refuse what would not fit, and stop the graph at the node.
"""

from __future__ import annotations

import abc
import ctypes
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from skippy.telemetry import get_logger

from .base import EngineError, ModelLoadError
from .options import TapChoice

TAP_ENV: Final = "SKIPPY_TAP"

GGML_FUNCTIONS: Final = ("ggml_get_name", "ggml_nbytes", "ggml_is_contiguous", "ggml_backend_tensor_get")
"""What the tap calls in ggml; found by the caller in the library llama-cpp-python ships."""

EvalCallback: Final = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
"""ggml's ``ggml_backend_sched_eval_callback``: (tensor, ask, user data) -> bool."""

_NODE_NAME_SIZE: Final = 64
_FAULTS: Final = {
    1: "the boundary node is not f32",
    2: "the boundary node is not contiguous",
    3: "the boundary node does not consist of whole rows",
    4: "the boundary node has more rows than the output buffer",
}

_log = get_logger("skippy.engine")


class _TapStruct(ctypes.Structure):
    """Mirror of ``struct skippy_tap`` in _tap.c."""

    _fields_ = [
        ("get_name", ctypes.c_void_p),
        ("nbytes", ctypes.c_void_p),
        ("is_contiguous", ctypes.c_void_p),
        ("tensor_get", ctypes.c_void_p),
        ("node", ctypes.c_char * _NODE_NAME_SIZE),
        ("row_bytes", ctypes.c_uint64),
        ("output", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("status", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Tap(abc.ABC):
    """Reads the boundary of one context. Used by the engine's thread only.

    Attributes:
        kind: ``"c"`` or ``"python"``.
        callback: address of the eval callback, for ``llama_context_params.cb_eval``.
        user_data: its user data pointer. Both live as long as this object.
    """

    kind: str
    callback: int
    user_data: int

    @abc.abstractmethod
    def arm(self, address: int, capacity: int) -> None:
        """Before a decode: write rows at ``address``, at most ``capacity`` bytes."""

    @abc.abstractmethod
    def finish(self) -> None:
        """After a decode: forget the buffer.

        Raises:
            EngineError: fewer bytes than ``capacity`` came, or something that could not be taken.
        """


def _check_amount(status: int, used: int, capacity: int, node: bytes) -> None:
    if status:
        raise EngineError(f"{_FAULTS.get(status, 'the boundary tap failed')} (node {node.decode()})")
    if used != capacity:
        raise EngineError(f"the boundary node {node.decode()} gave {used} bytes, expected {capacity}")


class CTap(Tap):
    """The tap compiled from ``_tap.c``."""

    kind = "c"

    def __init__(
        self, library: ctypes.CDLL, functions: Mapping[str, int], node: bytes, row_bytes: int
    ) -> None:
        library.skippy_tap_size.restype = ctypes.c_size_t
        if library.skippy_tap_size() != ctypes.sizeof(_TapStruct):
            raise OSError("the compiled boundary tap is of another version")
        self._library = library
        self._node = node
        self._state = _TapStruct(*(functions[name] for name in GGML_FUNCTIONS), node, row_bytes)
        self.callback = ctypes.cast(library.skippy_tap_eval, ctypes.c_void_p).value or 0
        self.user_data = ctypes.addressof(self._state)

    def arm(self, address: int, capacity: int) -> None:
        state = self._state
        state.output, state.capacity, state.used, state.status = address, capacity, 0, 0

    def finish(self) -> None:
        state = self._state
        status, used, capacity = state.status, state.used, state.capacity
        state.output, state.capacity = None, 0
        _check_amount(status, used, capacity, self._node)


class PythonTap(Tap):
    """The fallback: the same steps as ``_tap.c``, in a ctypes callback."""

    kind = "python"

    def __init__(self, functions: Mapping[str, int], node: bytes, row_bytes: int) -> None:
        def bind(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            return ctypes.CFUNCTYPE(result, *arguments)(functions[name])

        self._get_name = bind("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._nbytes = bind("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self._is_contiguous = bind("ggml_is_contiguous", ctypes.c_bool, ctypes.c_void_p)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._tensor_get = bind("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        self._node = node
        self._row_bytes = row_bytes
        self._output = self._capacity = self._used = self._status = 0
        self._function = EvalCallback(self._evaluate)
        self.callback = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.user_data = 0

    def _evaluate(self, tensor: int, ask: bool, _user_data: int | None) -> bool:
        if ask:
            return bool(self._get_name(tensor) == self._node)
        if not self._status:
            self._status = self._copy_rows(tensor)
        return False

    def _copy_rows(self, tensor: int) -> int:
        # The type is the first member of ggml_tensor; 0 is F32.
        if ctypes.c_int32.from_address(tensor).value != 0:
            return 1
        if not self._is_contiguous(tensor):
            return 2
        size = self._nbytes(tensor)
        if size % self._row_bytes:
            return 3
        if not self._output or size > self._capacity - self._used:
            return 4
        self._tensor_get(tensor, self._output + self._used, 0, size)
        self._used += size
        return 0

    def arm(self, address: int, capacity: int) -> None:
        self._output, self._capacity, self._used, self._status = address, capacity, 0, 0

    def finish(self) -> None:
        status, used, capacity = self._status, self._used, self._capacity
        self._output = self._capacity = 0
        _check_amount(status, used, capacity, self._node)


def compiled_library() -> pathlib.Path | None:
    """Path of the C tap built with the package, or None when it was not built."""
    folder = pathlib.Path(__file__).parent
    found = sorted(
        path for pattern in ("_tap*.so", "_tap*.pyd", "_tap*.dylib") for path in folder.glob(pattern)
    )
    return found[0] if found else None


def abort_function() -> int | None:
    """Address of the abort callback in the compiled library, or None without a usable one."""
    path = compiled_library()
    if path is None:
        return None
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).skippy_aborts, ctypes.c_void_p).value
    except (OSError, AttributeError):  # of another platform or version, which create_tap reports
        return None


def create_tap(functions: Mapping[str, int], node: str, row_bytes: int, choice: TapChoice = "auto") -> Tap:
    """A tap for one context. Logs one line that says which implementation is in use.

    Args:
        functions: addresses of :data:`GGML_FUNCTIONS`.
        node: whole name of the boundary node.
        row_bytes: bytes of one boundary row.
        choice: with ``"auto"`` the environment variable ``SKIPPY_TAP`` (``c`` or ``python``) decides, else C
            is taken when it was built.

    Raises:
        ModelLoadError: C was asked for and was not built, or a choice or node name that does not exist.
    """
    name = node.encode()
    if not 0 < len(name) < _NODE_NAME_SIZE:
        raise ModelLoadError(f"boundary node name of {len(name)} bytes, at most {_NODE_NAME_SIZE - 1} fit")
    wanted = choice
    if choice == "auto" and (value := os.environ.get(TAP_ENV, "")):
        if value not in ("auto", "c", "python"):
            raise ModelLoadError(f"{TAP_ENV} must be auto, c or python, not {value!r}")
        wanted = value  # type: ignore[assignment]
    if wanted != "python":
        path = compiled_library()
        reason = "not built"
        if path is not None:
            try:
                tap = CTap(ctypes.CDLL(str(path)), functions, name, row_bytes)
            except (OSError, AttributeError) as error:
                reason = str(error)
            else:
                _log.info("boundary tap", tap="c", node=node)
                return tap
        if wanted == "c":
            raise ModelLoadError(f"the C boundary tap is not usable: {reason}")
        _log.info("boundary tap", tap="python", node=node, c_tap=reason)
    else:
        _log.info("boundary tap", tap="python", node=node)
    return PythonTap(functions, name, row_bytes)

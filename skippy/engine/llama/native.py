"""The native library: one-time set-up, where ggml's functions are, and what llama.cpp logs."""

from __future__ import annotations

import collections
import ctypes
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from skippy.engine.base import ModelLoadError
from skippy.engine.tap import GGML_FUNCTIONS
from skippy.telemetry import get_logger

_SPIN_VARIABLE: Final = "GOMP_SPINCOUNT"
_SPIN_VARIABLES: Final = (_SPIN_VARIABLE, "OMP_WAIT_POLICY")
_SPINS: Final = "1000"
"""What libgomp takes of its own accord where it knows of more threads than cores."""


def _load() -> Any:
    """The library, with an OpenMP whose threads fall asleep soon after they have nothing to do.

    By default they go on for 300,000 rounds, some 10 ms, at every barrier and behind every native call. That
    takes cores from whatever else runs on the machine: other stages, for which this one then waits, and the
    event loop. libgomp reads its environment as it is loaded, and never again.
    """
    ours = not any(name in os.environ for name in _SPIN_VARIABLES)
    if ours:
        os.environ[_SPIN_VARIABLE] = _SPINS
    try:
        import llama_cpp.llama_cpp as module
    finally:
        if ours:
            del os.environ[_SPIN_VARIABLE]
    return module


api: Final[Any] = _load()
"""llama-cpp-python's low-level API. Pointers are plain integers there."""

_LEVEL_WARN: Final = 3
_LEVEL_ERROR: Final = 4
_LEVEL_CONTINUED: Final = 5
_EXPECTED: Final = ("dummy tokens", "removing memory module entries")
"""Warnings that every slice without a vocabulary causes, by design, and every decode that was aborted."""
_ABORTED: Final = ("failed with error 1", "failed to decode, ret = 2", "compute status: 1")
"""Ends of the errors with which a decode that was aborted tells of it: nothing has failed."""

_log = get_logger("skippy.llama")
_lock = threading.Lock()
_ready = False


class _LogRouter:
    """Receives llama.cpp's log, from any of its threads: warnings and errors pass, the rest is dropped."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=8)
        self.silent = False
        self._level = 0
        # Kept for the life of the process: the library holds the pointer.
        self.callback = api.llama_log_callback(self._receive)

    def _receive(self, level: int, text: bytes | None, _user_data: int | None) -> None:
        if level != _LEVEL_CONTINUED:
            self._level = level
        if self._level not in (_LEVEL_WARN, _LEVEL_ERROR) or text is None:
            return
        message = text.decode(errors="replace").strip()
        if not message or message == "." or message.endswith(_ABORTED):
            return
        if self._level == _LEVEL_ERROR:
            self.errors.append(message)
        if self.silent:
            return
        if self._level == _LEVEL_ERROR:
            _log.error("llama.cpp", message=message)
        elif not any(words in message for words in _EXPECTED):
            _log.warning("llama.cpp", message=message)


_router = _LogRouter()


def initialise() -> None:
    """Start the backends and take over the log, once per process."""
    global _ready
    with _lock:
        if not _ready:
            api.llama_log_set(_router.callback, ctypes.c_void_p(0))
            api.llama_backend_init()
            _ready = True


@contextmanager
def reported_errors() -> Iterator[collections.deque[str]]:
    """What llama.cpp reports as errors inside the block, the last few lines of it."""
    _router.errors.clear()
    yield _router.errors


@contextmanager
def silenced() -> Iterator[None]:
    """Nothing of what llama.cpp says inside the block is logged: what it complains about is meant."""
    _router.silent = True
    try:
        yield
    finally:
        _router.silent = False


def ggml_functions(names: Sequence[str] = GGML_FUNCTIONS) -> dict[str, int]:
    """Addresses of ggml functions, by default those the tap calls.

    Looked up through the llama library's own handle, so that they belong to the copy of ggml it runs on;
    where a handle does not search dependencies (Windows), in the ggml libraries beside it.
    """
    folder = pathlib.Path(api.__file__).parent / "lib"
    libraries = [api._lib]
    found: dict[str, int] = {}
    for name in names:
        function = _symbol(libraries, folder, name)
        if function is None:
            raise ModelLoadError(f"{name} is not in the ggml library that llama-cpp-python ships")
        found[name] = function
    return found


def _symbol(libraries: list[ctypes.CDLL], folder: pathlib.Path, name: str) -> int | None:
    for library in libraries:
        function = getattr(library, name, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    if len(libraries) == 1:
        libraries.extend(ctypes.CDLL(str(path)) for path in sorted(folder.glob("*ggml[-.]*")))
        return _symbol(libraries, folder, name) if len(libraries) > 1 else None
    return None


def metadata(model: int, key: str) -> str | None:
    """A scalar metadata value as text, or None; at most 255 bytes."""
    buffer = ctypes.create_string_buffer(256)
    size = api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return None if size < 0 else buffer.value.decode(errors="replace")


def address_of(buffer: memoryview) -> int:
    """Address of a C-contiguous buffer's first byte; the caller keeps the buffer alive."""
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])

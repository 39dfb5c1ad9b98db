"""The decode that runs now, as other threads see it: what makes an abort hit that one and no other."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from .base import EngineError, Segment


class RunningDecode:
    """Between :meth:`begin` and :meth:`end` a decode can be aborted.

    Attributes:
        flag: address of an int32 that is not 0 from an abort to the end of the decode.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: Sequence[Segment] | None = None
        self._flag = ctypes.c_int32(0)
        self.flag = ctypes.addressof(self._flag)

    @property
    def aborted(self) -> bool:
        return self._flag.value != 0

    def begin(self, segments: Sequence[Segment]) -> None:
        with self._lock:
            self._segments = segments

    def end(self) -> None:
        """The decode is over, and aborts come too late. Raises EngineError if one came before."""
        with self._lock:
            self._segments = None
            aborted, self._flag.value = self._flag.value, 0
        if aborted:
            raise EngineError("aborted while it ran")

    def abort(self, segments: Sequence[Segment] | None) -> bool:
        """As :meth:`StageEngine.abort`. From any thread."""
        with self._lock:
            if self._segments is None or (segments is not None and segments is not self._segments):
                return False
            self._flag.value = 1
            return True

"""What the sequences of one context hold: trimming, copying, exporting and importing it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple

import attrs
import numpy as np

from skippy.engine.base import ContextFullError, EngineError, StateBytes
from skippy.engine.options import EngineOptions

from .compare import largest_difference
from .layout import Layout
from .native import address_of, api
from .pool import CellPool
from .state import HEADER_BYTES, StateFormat, as_of_sequence_0, check_cells, rewrite, whole_length

_KEPT_SCRATCH: Final = 64 * 2**20
_WORD: Final = 4
_WINDOW_PADDING: Final = 256


@attrs.frozen(slots=True, kw_only=True)
class MemoryKind:
    """What sort of memory llama.cpp made.

    Attributes:
        recurrent: some layers keep one state per sequence instead of one per position.
        attention: some layers keep something per position.
        window: positions that sliding-window layers attend to; 0 without such.
        forgetful: those layers forget what is behind the window (no ``swa_full``).
        unified: all sequences share one pool of cells.
        sequences: sequence ids.
    """

    recurrent: bool
    attention: bool
    window: int
    forgetful: bool
    unified: bool
    sequences: int

    @classmethod
    def of(cls, model: int, options: EngineOptions) -> MemoryKind:
        recurrent = bool(api.llama_model_is_recurrent(model))
        window = int(api.llama_model_n_swa(model))
        return cls(
            recurrent=recurrent or bool(api.llama_model_is_hybrid(model)),
            attention=not recurrent,
            window=window,
            forgetful=window > 0 and not options.swa_full,
            unified=options.kv_unified,
            sequences=options.max_sequences,
        )

    @property
    def streams(self) -> int:
        """Caches of an own set of cells, one for each sequence or one for all."""
        return 1 if self.unified else self.sequences

    @property
    def can_trim(self) -> bool:
        return not (self.recurrent or self.forgetful)

    @property
    def shares_cells(self) -> bool:
        """Whether copying within the context is a matter of metadata (``seq_cp``)."""
        return self.unified or not self.attention


class SequenceMemory:
    """The native sequences of a context. Arguments have been checked by the engine.

    Attributes:
        lengths: positions each sequence holds. The engine raises them after a decode.
        failed: why nothing works any more, if so: a sequence that could not be cleared.
    """

    def __init__(self, context: int, kind: MemoryKind, state: StateFormat) -> None:
        self.lengths = [0] * kind.sequences
        self.failed: str | None = None
        self._context = context
        self._memory = int(api.llama_get_memory(context))
        self._kind = kind
        self._state = state
        self._pool: CellPool | None = None
        if kind.unified and kind.attention:
            self._pool = CellPool(int(api.llama_n_ctx(context)), self.lengths)
        self._scratch = np.zeros(0, np.uint8)
        self._floors = [0] * kind.sequences  # state leaves out what windowed layers no longer look at

    def trim(self, sequence: int, length: int) -> None:
        if length == self.lengths[sequence]:
            return
        if length and not self._kind.can_trim:
            raise EngineError("this model's state cannot be trimmed; drop the sequence instead")
        if 0 < length < self._floors[sequence]:
            raise EngineError(
                f"sequence {sequence} was imported with {self._floors[sequence]} positions and cannot be "
                f"trimmed to {length}: layers that look at a window have no more than that of it"
            )
        if not self._native_trim(sequence, length):
            self.drop(sequence)
            raise EngineError(f"sequence {sequence} could not be trimmed to {length} and was dropped")
        self._shorten(sequence, length)

    def _shorten(self, sequence: int, length: int) -> None:
        self.lengths[sequence] = length
        if self._pool is not None:
            self._pool.shortened(sequence, length)

    @property
    def free_cells(self) -> int | None:
        """Cells of a shared pool that no sequence holds; None where each has its own."""
        return None if self._pool is None else self._pool.free

    def check_room(self, rows: int) -> None:
        """Raises ContextFullError where so many more rows do not fit into a shared pool."""
        free = self.free_cells
        if free is not None and rows > free:
            raise ContextFullError(f"the cache has no room for {rows} more rows, {free} cells are free")

    def drop(self, sequence: int) -> None:
        self._floors[sequence] = 0
        self._shorten(sequence, 0)
        api.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        if api.llama_memory_seq_pos_max(self._memory, sequence) != -1:
            self.failed = f"sequence {sequence} could not be cleared"

    def rewind(self, sequences: Sequence[int], *, ran: bool) -> None:
        """After a failed decode: put sequences back to their lengths, or drop those where that fails.

        ``ran``: some rows were computed, perhaps over cells that a shorter sequence still looks at.
        """
        for sequence in sequences:
            lost = ran and self._kind.forgetful
            if lost or not self._native_trim(sequence, self.lengths[sequence]):
                self.drop(sequence)

    def _native_trim(self, sequence: int, length: int) -> bool:
        """Remove positions from ``length`` on. False if llama.cpp could not, or holds something else now."""
        if not api.llama_memory_seq_rm(self._memory, sequence, length if length else -1, -1):
            return False
        return bool(api.llama_memory_seq_pos_max(self._memory, sequence) == length - 1)

    def copy(self, source: int, target: int, count: int) -> bool:
        """Give ``target``, which is empty, the first ``count`` positions of ``source``.

        True: llama.cpp moves the cells when it next decodes, which must be at once.
        """
        held = self.lengths[source]
        if count < held and count and not self._kind.can_trim:
            raise EngineError("this model's state can only be copied whole")
        if 0 < count < self._floors[source]:
            raise EngineError(
                f"of sequence {source} at least {self._floors[source]} positions must be copied"
            )
        if not count:
            return False
        # Across streams llama.cpp's own copy moves all cells, held or not; but state leaves out what windowed
        # layers no longer look at, and the copy is to be as sliceable as its source.
        by_state = self._kind.forgetful or not (self._kind.shares_cells or self._kind.window)
        if by_state:
            self.check_room(count)
            self._native_import(target, self._first(self._native_export(source), count, held), count)
        else:
            part = count if count < held and self._kind.shares_cells else -1
            api.llama_memory_seq_cp(self._memory, source, target, -1, part)
            self._floors[target] = self._floors[source]
            if self._pool is not None:
                self._pool.copied(source, target, count)
        if not self._native_trim(target, count):
            self.drop(target)
            raise EngineError(f"sequence {source} could not be copied")
        self.lengths[target] = count
        return not (by_state or self._kind.shares_cells)

    def _first(self, body: memoryview, count: int, held: int) -> memoryview:
        """The first ``count`` of ``held`` positions of native state."""
        if count == held:
            return body
        return rewrite(body, self._layout(body), length=count, streams=self._kind.streams).data

    def export(self, sequence: int, count: int) -> memoryview:
        length = self.lengths[sequence]
        if count < length:
            return self._export_first(sequence, count)
        size = self.state_bytes(sequence)
        moved = 0 if self._kind.unified else sequence * _WORD
        front = -(-moved // 8) * 8
        buffer = np.empty(front + HEADER_BYTES + size, np.uint8).data
        buffer[len(buffer) - moved :] = bytes(moved)
        native = buffer[front + HEADER_BYTES - moved :]
        self._native_read(sequence, native, size)
        layout = Layout.of(native[:size], recurrent=self._kind.recurrent)
        if layout is not None and len(layout.sections) == 1 and not self._kind.recurrent:
            as_of_sequence_0(native, layout, moved)
            return self._state.seal(buffer[front:], length)
        return self._state.seal(buffer[front - moved : len(buffer) - moved], length)

    def _export_first(self, sequence: int, count: int) -> memoryview:
        body = self._native_export(sequence)
        layout = self._layout(body)
        if count and not whole_length(layout):
            raise EngineError(f"the state of sequence {sequence} can only be exported whole")
        first = rewrite(body, layout, length=count, streams=self._kind.streams, offset=HEADER_BYTES)
        return self._state.seal(first.data, count)

    def import_(self, sequence: int, state: StateBytes, context_length: int) -> None:
        if not isinstance(state, bytes | bytearray | memoryview):
            state = self._joined(state)
        body, length = self._state.open(state)
        if length > context_length:
            raise ContextFullError(f"state of {length} positions, the context holds {context_length}")
        if not length:
            return
        self.check_room(length)
        layout = self._layout(body)
        check_cells(layout, length, windowed=self._kind.window > 0)
        if layout.streams != self._kind.streams:
            body = rewrite(body, layout, length=length, streams=self._kind.streams).data
        self._native_import(sequence, body, length)
        self.lengths[sequence] = length
        self._floors[sequence] = 0 if whole_length(layout) else length

    def difference(self, first: int, second: int, length: int) -> float:
        one = self._native_export(first)
        other = np.empty(self.state_bytes(second), np.uint8).data
        self._native_read(second, other, len(other))
        return largest_difference(one, self._layout(one), other, self._layout(other), length)

    def layout(self, sequence: int) -> Layout | None:
        """How the state of a sequence is laid out; None if in a way that is not known here."""
        return Layout.of(self._native_export(sequence), recurrent=self._kind.recurrent)

    def _layout(self, body: memoryview) -> Layout:
        layout = Layout.of(body, recurrent=self._kind.recurrent)
        if layout is None:
            raise EngineError("sequence state in a format that is not known here")
        return layout

    def state_bytes(self, sequence: int) -> int:
        """Size of llama.cpp's state of a sequence."""
        return int(api.llama_state_seq_get_size(self._context, sequence))

    def _native_export(self, sequence: int) -> memoryview:
        """llama.cpp's state of a sequence, in a buffer that the next call of this overwrites."""
        size = self.state_bytes(sequence)
        body = self._scratch_of(size)
        self._native_read(sequence, body, size)
        return body

    def _joined(self, pieces: Sequence[bytes | memoryview]) -> memoryview:
        """Pieces of a state one behind the other, in the buffer that the next export overwrites."""
        buffer = self._scratch_of(sum(memoryview(piece).nbytes for piece in pieces))
        start = 0
        for piece in pieces:
            view = memoryview(piece).cast("B")
            buffer[start : start + len(view)] = view
            start += len(view)
        return buffer

    def _scratch_of(self, size: int) -> memoryview:
        if size > _KEPT_SCRATCH:
            return np.empty(size, np.uint8).data
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch.data[:size]

    def _native_read(self, sequence: int, buffer: memoryview, size: int) -> None:
        native = (ctypes.c_uint8 * size).from_address(address_of(buffer))
        if not size or api.llama_state_seq_get_data(self._context, native, size, sequence) != size:
            raise EngineError(f"the state of sequence {sequence} could not be read")

    def _native_import(self, sequence: int, body: memoryview, length: int) -> None:
        """Load native state; on failure the sequence is empty. Cells are checked against ``length``."""
        native = (ctypes.c_uint8 * len(body)).from_address(address_of(body))
        read = api.llama_state_seq_set_data(self._context, native, len(body), sequence)
        last = api.llama_memory_seq_pos_max(self._memory, sequence)
        if read != len(body) or last != length - 1:
            self.drop(sequence)
            raise EngineError(f"the state of sequence {sequence} could not be restored")


class CacheSizes(NamedTuple):
    """As :class:`~skippy.engine.EngineInfo` has them, in bytes."""

    position_bytes: int
    sequence_bytes: int
    kv_bytes: int

    @classmethod
    def of(cls, layout: Layout, context: int, kind: MemoryKind) -> CacheSizes:
        """The sizes of a context's memory, from the layout of a state with cells.

        The numbers of cells and rows are llama.cpp's (``llama_kv_cache_iswa``, ``llama_memory_recurrent``).
        """
        cells = int(api.llama_n_ctx(context)) // kind.streams
        recent = kind.window * (kind.sequences if kind.unified else 1) + int(api.llama_n_ubatch(context))
        position = sequence = total = 0
        for index, section in enumerate(layout.sections):
            if section.recurrent:
                sequence += section.row_bytes
                total += section.row_bytes * kind.sequences
                continue
            position += section.row_bytes
            held = cells
            if kind.forgetful and index == 1:
                held = -(-min(cells, recent) // _WINDOW_PADDING) * _WINDOW_PADDING
            transposed = [rows.row_bytes for rows in section.rows if rows.element_bytes]
            padding = len(transposed) * max(transposed, default=0) - sum(transposed)  # all as the widest
            total += (section.row_bytes + padding) * held * kind.streams
        return cls(position, sequence, total)

    @classmethod
    def estimated(cls, first: int, second: int, context: int) -> CacheSizes:
        """The sizes by those of the states of one and of two positions, as if all cells were alike."""
        return cls(second - first, 0, (second - first) * int(api.llama_n_ctx(context)))

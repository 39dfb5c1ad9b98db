"""Exported sequence state: llama.cpp's own format, made the same for every sequence, in an envelope.

llama.cpp's format says little about where it came from and trusts what it reads. The envelope carries the
slice, the settings that fix the layout, the length and a checksum, so that only whole state of the same
slice reaches the native code.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from skippy.engine.base import EngineError
from skippy.engine.options import EngineOptions
from skippy.models import SliceInfo

from .layout import MAGIC, Layout, Rows, Section

_MAGIC: Final = b"SKLLAMA\x02"
_HEADER: Final = struct.Struct("<8s16s16sIQ4x")  # magic, fingerprint, checksum, length, body bytes
HEADER_BYTES: Final = _HEADER.size
_SUM_WORDS: Final = 4096

Bytes = npt.NDArray[np.uint8]


@attrs.frozen(slots=True)
class StateFormat:
    """What state of one loaded stage looks like.

    Attributes:
        fingerprint: 16 bytes; equal for equal slices loaded with settings of equal layout.
    """

    fingerprint: bytes

    @classmethod
    def of(cls, info: SliceInfo, options: EngineOptions) -> StateFormat:
        """The format of ``info`` loaded with ``options``.

        Neither the context length matters to it nor how many sequences there are and whether they share
        cells: import translates that.
        """
        identity = (
            info.architecture,
            (info.layer_start, info.layer_end, info.layer_count, info.front_layers, info.spare_layers),
            info.hidden_size,
            info.source_sha256 or f"{info.file_bytes} bytes",
            (options.cache_type_k, options.cache_type_v, options.flash_attn, options.swa_full),
        )
        return cls(hashlib.blake2b(repr(identity).encode(), digest_size=16).digest())

    def seal(self, buffer: memoryview, length: int) -> memoryview:
        """Fill in the header of ``buffer``, whose body starts at ``HEADER_BYTES``; the sealed state."""
        body = buffer[HEADER_BYTES:]
        _HEADER.pack_into(buffer, 0, _MAGIC, self.fingerprint, checksum(body), length, len(body))
        return buffer.toreadonly()

    def open(self, state: bytes | bytearray | memoryview) -> tuple[memoryview, int]:
        """The native body and the number of positions in it.

        Raises:
            EngineError: damaged, of another slice or of other settings.
        """
        view = memoryview(state).cast("B")
        if len(view) < HEADER_BYTES:
            raise EngineError(f"sequence state of {len(view)} bytes is shorter than its header")
        magic, fingerprint, expected, length, size = _HEADER.unpack_from(view)
        body = view[HEADER_BYTES:]
        if magic != _MAGIC:
            raise EngineError("not sequence state of this engine")
        if fingerprint != self.fingerprint:
            raise EngineError("sequence state of another slice, or of a stage with other cache settings")
        if len(body) != size or checksum(body) != expected:
            raise EngineError("sequence state is damaged")
        return body, length


def checksum(body: memoryview) -> bytes:
    """16 bytes that tell damage, at a tenth of the cost of a digest of everything.

    The body is a table of 64-bit words with rows of 32 KiB; digested are the sums of its rows and of its
    columns. A changed word changes one of each, and so does one that moved.
    """
    words = len(body) // 8
    whole = words // _SUM_WORDS
    table = np.frombuffer(body, "<u8", whole * _SUM_WORDS).reshape(whole, _SUM_WORDS)
    digest = hashlib.blake2b(len(body).to_bytes(8, "little"), digest_size=16)
    digest.update(table.sum(axis=0, dtype=np.uint64).tobytes())
    digest.update(table.sum(axis=1, dtype=np.uint64).tobytes())
    digest.update(body[whole * _SUM_WORDS * 8 :])
    return digest.digest()


def check_cells(layout: Layout, length: int, *, windowed: bool) -> None:
    """Check the cells of attention caches, which llama.cpp takes as they are.

    It takes any position, but cannot remove a cell whose position is negative.

    Raises:
        EngineError: the cells are not exactly the positions ``0 … length-1``; of a windowed model's second
            cache, not the last of them.
    """
    for index, section in enumerate(layout.sections):
        found = np.sort(section.positions)
        first = length - len(found)
        if section.recurrent:
            fits = len(found) == 1 and found[0] == length - 1
        else:
            fits = first == 0 or (windowed and index == 1 and 0 < first < length)
            fits = fits and np.array_equal(found, np.arange(first, length))
        if not fits:
            raise EngineError(f"sequence state does not hold the positions 0 to {length - 1}, each once")


def whole_length(layout: Layout) -> bool:
    """Whether every cache holds all positions, so that the state can be shortened."""
    counts = {len(section.positions) for section in layout.sections}
    return len(counts) == 1 and not any(section.recurrent for section in layout.sections)


def rewrite(body: memoryview, layout: Layout, *, length: int, streams: int, offset: int = 0) -> Bytes:
    """The state of the first ``length`` positions, for a context of so many streams, as if of sequence 0.

    Args:
        offset: leave so many bytes free in front.

    Returns:
        A new buffer; one copy of what is kept.
    """
    parts: list[bytes | memoryview] = [bytes(offset), struct.pack("<Ii", MAGIC, 0)]
    for section in layout.sections:
        if section.recurrent:
            parts.append(body[section.start : section.end])
        else:
            parts += _rewritten(body, section, np.flatnonzero(section.positions < length), streams)
    buffer = np.empty(sum(len(part) for part in parts), np.uint8)
    start = 0
    for part in parts:
        stop = start + len(part)
        buffer[start:stop] = np.frombuffer(part, np.uint8)
        start = stop
    return buffer


def _rewritten(
    body: memoryview, section: Section, keep: npt.NDArray[np.intp], streams: int
) -> list[bytes | memoryview]:
    count = len(section.positions)
    parts: list[bytes | memoryview] = [struct.pack("<II", streams, len(keep))]
    if len(keep):
        start = section.count_at + 4
        end = start + count * section.cell_words * 4
        cells = np.frombuffer(body, "<i4", count * section.cell_words, start).reshape(count, -1)[keep]
        cells[:, -1] = 0
        parts += [cells.tobytes(), body[end : end + 8]]
        for rows in section.rows:
            parts += [body[rows.header : rows.start], _kept(body, rows, count, keep)]
    return [*parts, bytes(4 * (streams - 1))]


def _kept(body: memoryview, rows: Rows, count: int, keep: npt.NDArray[np.intp]) -> bytes | memoryview:
    data = body[rows.start : rows.start + count * rows.row_bytes]
    first, after = int(keep[0]), int(keep[-1]) + 1
    if rows.element_bytes:
        table = np.frombuffer(data, np.uint8).reshape(-1, count, rows.element_bytes)
        return table[:, keep].tobytes()
    if after - first == len(keep):
        return data[first * rows.row_bytes : after * rows.row_bytes]
    return np.frombuffer(data, np.uint8).reshape(count, rows.row_bytes)[keep].tobytes()


def as_of_sequence_0(native: memoryview, layout: Layout, moved: int) -> None:
    """Make state with one attention cache look like that of sequence 0, in place, so that equal prefixes are
    equal bytes: from ``native[moved:]`` on it does, and the data stay where they are.

    Args:
        native: the state, and behind it ``moved`` bytes of zeros.
        moved: bytes of the counts of the streams before the sequence's own.
    """
    struct.pack_into("<IiI", native, moved, MAGIC, 0, layout.streams)
    (section,) = layout.sections
    if len(section.positions):
        words = len(section.positions) * section.cell_words
        cells = np.frombuffer(native, "<i4", words, section.count_at + 4).reshape(-1, section.cell_words)
        cells[:, -1] = 0

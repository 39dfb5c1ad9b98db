"""The envelope around exported sequence state.

llama.cpp's own format says little about where it came from and trusts what it reads. The envelope carries the
slice, the settings that fix the layout, the length and a checksum, so that only whole state of the same
slice reaches the native code.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import attrs
import numpy as np

from skippy.engine.base import EngineError
from skippy.engine.options import EngineOptions
from skippy.models import SliceInfo

_MAGIC: Final = b"SKLLAMA\x01"
_HEADER: Final = struct.Struct("<8s16s16sIQ")  # magic, fingerprint, checksum of the body, length, body bytes
HEADER_BYTES: Final = _HEADER.size
_PREFIX_WORDS: Final = 3  # llama.cpp's state starts with: magic, sequence, streams
_CELL: Final = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])


@attrs.frozen(slots=True)
class StateFormat:
    """What state of one loaded stage looks like.

    Attributes:
        fingerprint: 16 bytes; equal for equal slices loaded with settings of equal layout.
    """

    fingerprint: bytes

    @classmethod
    def of(cls, info: SliceInfo, options: EngineOptions) -> StateFormat:
        """The format of ``info`` loaded with ``options``. The context length does not matter to it."""
        identity = (
            info.architecture,
            (info.layer_start, info.layer_end, info.layer_count, info.spare_layers),
            info.hidden_size,
            info.source_sha256 or f"{info.file_bytes} bytes",
            (options.cache_type_k, options.cache_type_v, options.flash_attn),
            (options.kv_unified, options.swa_full, options.max_sequences),
        )
        return cls(hashlib.blake2b(repr(identity).encode(), digest_size=16).digest())

    def seal(self, buffer: bytearray, length: int) -> bytes:
        """Fill in the header of ``buffer``, whose body starts at ``HEADER_BYTES``."""
        body = memoryview(buffer)[HEADER_BYTES:]
        checksum = hashlib.blake2b(body, digest_size=16).digest()
        _HEADER.pack_into(buffer, 0, _MAGIC, self.fingerprint, checksum, length, len(body))
        return bytes(buffer)

    def open(self, state: bytes | memoryview, context_length: int) -> tuple[memoryview, int]:
        """The native body and the number of positions in it.

        Raises:
            EngineError: damaged, of another slice, of other settings, or too long.
        """
        view = memoryview(state).cast("B")
        if len(view) < HEADER_BYTES:
            raise EngineError(f"sequence state of {len(view)} bytes is shorter than its header")
        magic, fingerprint, checksum, length, size = _HEADER.unpack_from(view)
        body = view[HEADER_BYTES:]
        if magic != _MAGIC:
            raise EngineError("not sequence state of this engine")
        if fingerprint != self.fingerprint:
            raise EngineError("sequence state of another slice, or of a stage with other cache settings")
        if len(body) != size or hashlib.blake2b(body, digest_size=16).digest() != checksum:
            raise EngineError("sequence state is damaged")
        if length > context_length:
            raise EngineError(f"sequence state of {length} positions, the context holds {context_length}")
        return body, length


def check_cells(body: memoryview, length: int) -> None:
    """Check the cells of a plain attention cache in llama.cpp's format (``llama_kv_cache::state_write``).

    llama.cpp takes any position, but cannot remove a cell whose position is negative.

    Raises:
        EngineError: the cells are not exactly the positions ``0 … length-1``.
    """
    words = np.frombuffer(body[: len(body) // 4 * 4], dtype="<u4")
    streams = int(words[_PREFIX_WORDS - 1]) if len(words) > _PREFIX_WORDS else 0
    counts = words[_PREFIX_WORDS : _PREFIX_WORDS + streams]  # zero for the streams before the sequence's own
    used = np.flatnonzero(counts)
    if not used.size or counts[used[0]] != length:
        raise EngineError("sequence state does not hold the cells it says")
    start = 4 * (_PREFIX_WORDS + int(used[0]) + 1)
    if len(body) < start + length * _CELL.itemsize:
        raise EngineError("sequence state ends inside its cells")
    cells = np.frombuffer(body, dtype=_CELL, count=length, offset=start)
    whole = np.array_equal(np.sort(cells["position"]), np.arange(length))
    if not whole or (cells["sequences"] != 1).any():
        raise EngineError(f"sequence state does not hold the positions 0 to {length - 1}, each once")

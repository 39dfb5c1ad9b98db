"""f32 fields, bit for bit.

Python floats are f64. Every f32 survives the trip f32 → f64 → f32 except a NaN, whose payload and
"signalling" bit the conversion changes. So a NaN read from the wire becomes a :class:`Float32NaN`, which
remembers its 32 bits; every other value is a plain float.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from .errors import LocalProtocolError

_F32: Final = struct.Struct("<f")
_U32: Final = struct.Struct("<I")
_EXPONENT: Final = 0x7F800000
_FRACTION: Final = 0x007FFFFF


class Float32NaN(float):
    """A NaN that carries its f32 bit pattern."""

    __slots__ = ("bits",)

    bits: int

    def __new__(cls, bits: int) -> Float32NaN:
        if not 0 <= bits <= 0xFFFFFFFF or bits & _EXPONENT != _EXPONENT or not bits & _FRACTION:
            raise ValueError(f"{bits:#x} is not the bit pattern of an f32 NaN")
        self = super().__new__(cls, "nan")
        self.bits = bits
        return self

    def __reduce__(self) -> tuple[type[Float32NaN], tuple[int]]:
        return (Float32NaN, (self.bits,))

    def __repr__(self) -> str:
        return f"Float32NaN({self.bits:#010x})"


def float_of_bits(bits: int) -> float:
    """The f32 with this bit pattern (0 … 2**32-1)."""
    if bits & _EXPONENT == _EXPONENT and bits & _FRACTION:
        return Float32NaN(bits)
    value: float = _F32.unpack(_U32.pack(bits))[0]
    return value


def bits_of_float(value: float) -> int:
    """The bit pattern that :func:`pack_f32` writes."""
    if isinstance(value, Float32NaN):
        return value.bits
    bits: int = _U32.unpack(_F32.pack(value))[0]
    return bits


def restore_nans(values: Sequence[float], data: bytes | bytearray | memoryview) -> tuple[float, ...]:
    """``values``, unpacked from consecutive f32 in ``data``, with the exact bits of each NaN put back."""
    return tuple(v if v == v else Float32NaN(_U32.unpack_from(data, 4 * i)[0]) for i, v in enumerate(values))


def pack_f32(names: Iterable[str], values: Sequence[float]) -> bytes:
    """Little-endian f32 of ``values``; ``names`` are for error texts.

    Raises:
        LocalProtocolError: a value is not a number, or beyond f32's range.
    """
    try:
        data = struct.pack(f"<{len(values)}f", *values)
    except (OverflowError, struct.error):
        for name, value in zip(names, values, strict=True):
            try:
                _F32.pack(value)
            except (OverflowError, struct.error):
                raise LocalProtocolError(f"{name}: {value!r} is not an f32") from None
        raise
    total = sum(values)
    if total == total:
        return data
    patched = bytearray(data)
    for i, value in enumerate(values):
        if isinstance(value, Float32NaN):
            _U32.pack_into(patched, 4 * i, value.bits)
    return bytes(patched)

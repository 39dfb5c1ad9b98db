"""A bounded reader of GGUF headers.

Nothing in the file is believed before it is checked: counts against the bytes that are left and against fixed
limits, sizes against overflow, tensor data against the end of the file. Arrays are not loaded; a
:class:`LazyArray` knows where they are and reads elements when asked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from skippy.models.errors import GGUFError, show
from skippy.models.reading import Cursor, FileStamp, open_regular
from skippy.models.tensor_types import TYPES, tensor_bytes

MAX_METADATA = 1 << 16  # key/value pairs; real files have some 30 to 60
MAX_TENSORS = 1 << 17  # the largest real files (experts stored apart) have some 70 000
MAX_KEY = (1 << 16) - 1  # bytes, from the format's description
MAX_TENSOR_NAME = 63  # bytes; ggml keeps names in 64 with the terminator
MAX_DIMENSIONS = 4
MAX_STRING = 8 << 20  # bytes of one text value; chat templates stay below 100 KiB
MAX_TEXT = 64 << 20  # bytes of all keys and text values together
MAX_STRINGS = 1 << 22  # elements of a string array; the largest vocabularies and merge lists stay below 1 M
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32


class ValueType(enum.IntEnum):
    """Types of metadata values, with the numbers of the file format."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: Mapping[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}

Scalar = int | float | bool | str


@attrs.frozen(slots=True, eq=False)
class LazyArray:
    """A metadata array left in the file.

    ``array[i]`` and iteration read from the file; nothing else of the array is held. Texts that are not UTF-8
    come with replacement characters; :meth:`raw` gives the bytes.

    Attributes:
        element_type: type of every element (never ARRAY).
        count: elements.
        offset: file offset of the first element.
        nbytes: bytes of all elements, length prefixes of texts included.
    """

    element_type: ValueType
    count: int
    offset: int
    nbytes: int
    _stamp: FileStamp

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Scalar:
        if index < 0:
            index += self.count
        if not 0 <= index < self.count:
            raise IndexError(f"index {index} of an array of {self.count}")
        return self._decode(self.raw(index))

    def __iter__(self) -> Iterator[Scalar]:
        for raw in self._elements(0):
            yield self._decode(raw)

    def raw(self, index: int) -> bytes:
        """The bytes of one element (a text without its length). ``0 <= index < count``."""
        return next(self._elements(index))

    def _decode(self, raw: bytes) -> Scalar:
        if self.element_type is ValueType.STRING:
            return raw.decode("utf-8", "replace")
        value: Scalar = SCALARS[self.element_type].unpack(raw)[0]
        return value

    def _elements(self, first: int) -> Iterator[bytes]:
        what = "an array element"
        fd = self._stamp.open()
        try:
            cursor = Cursor(self._stamp.path, fd, self.offset + self.nbytes, self.offset)
            if self.element_type is ValueType.STRING:
                cursor.skip_strings(first, what)
                for _ in range(first, self.count):
                    yield cursor.string(what, MAX_STRING)
            else:
                width = SCALARS[self.element_type].size
                cursor.skip(first * width, what)
                for _ in range(first, self.count):
                    yield cursor.take(width, what)
        finally:
            os.close(fd)


@attrs.frozen(slots=True, eq=False)
class Metadata:
    """One key and value, and the bytes ``[start, end)`` of the file that hold both."""

    key: str
    type: ValueType
    value: Scalar | LazyArray
    start: int
    end: int


@attrs.frozen(slots=True)
class TensorInfo:
    """Where a tensor is and how it is stored.

    Attributes:
        name: as in the file.
        dims: 1 to 4 sizes, the contiguous one first (ggml's order).
        type: ggml type number.
        offset: file offset of the data (absolute).
        nbytes: bytes of the data.
        file: the file that has the data; a model may have several.
    """

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int
    nbytes: int
    file: FileStamp

    @property
    def type_name(self) -> str:
        """ggml's name of the type, for instance ``Q4_1``."""
        return TYPES[self.type].name

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


@attrs.frozen(slots=True, eq=False)
class GGUFHeader:
    """Everything before the tensor data.

    Attributes:
        path: the file, as given.
        version: 2 or 3.
        alignment: bytes; tensor data starts at multiples of it.
        metadata: by key, in file order.
        tensors: by name, in file order.
        data_offset: file offset of the tensor data.
        stamp: state of the file when it was read.
        files: all files of the model, each in the state it was read in; mostly this one alone.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Metadata]
    tensors: Mapping[str, TensorInfo]
    data_offset: int
    stamp: FileStamp
    files: tuple[FileStamp, ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> GGUFHeader:
        """Read and check a file's header.

        Memory grows with the numbers of keys and tensors only, not with arrays; time with the header's bytes.

        Raises:
            GGUFError: no such file, not a GGUF, unsupported version or byte order, truncated or damaged.
        """
        path = Path(path)
        fd = open_regular(path)
        try:
            stamp = FileStamp.of(path, os.fstat(fd))
            return _read(stamp, Cursor(path, fd, stamp.size))
        finally:
            os.close(fd)

    @property
    def file_size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def value(self, key: str, default: Scalar | None = None) -> Scalar | LazyArray | None:
        """A metadata value, or ``default``."""
        entry = self.metadata.get(key)
        return default if entry is None else entry.value

    def text(self, key: str, default: str | None = None) -> str:
        """A text value; GGUFError when it is missing without a default, or not a text."""
        value = self.value(key, default)
        if not isinstance(value, str):
            raise GGUFError(self.path, self._complaint(key, value, "a text"))
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A non-negative integer value; GGUFError when it is missing without a default, or something else."""
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise GGUFError(self.path, self._complaint(key, value, "a non-negative integer"))
        return value

    def _complaint(self, key: str, value: Scalar | LazyArray | None, wanted: str) -> str:
        if value is None:
            return f"metadata key {show(key)} is missing"
        return f"metadata key {show(key)} is {self.metadata[key].type.name}, expected {wanted}"


def _read(stamp: FileStamp, cursor: Cursor) -> GGUFHeader:
    version = _read_preamble(cursor)
    tensor_count = cursor.u64("the tensor count")
    metadata_count = cursor.u64("the metadata count")
    _check_count(cursor, "tensors", tensor_count, MAX_TENSORS, 32)
    _check_count(cursor, "metadata keys", metadata_count, MAX_METADATA, 13)
    metadata = _read_metadata(cursor, metadata_count, stamp)
    alignment = _alignment(cursor, metadata)
    relative = _read_tensor_infos(cursor, tensor_count, alignment, stamp)
    data_offset = cursor.position + -cursor.position % alignment
    tensors = {}
    for info in relative:
        end = data_offset + info.offset + info.nbytes
        if end > stamp.size:
            cursor.fail(
                f"truncated: tensor {show(info.name)} ends at byte {end}, the file has {stamp.size} bytes"
            )
        tensors[info.name] = attrs.evolve(info, offset=data_offset + info.offset)
    _refuse_overlaps(cursor, relative)
    return GGUFHeader(stamp.path, version, alignment, metadata, tensors, data_offset, stamp, (stamp,))


def _refuse_overlaps(cursor: Cursor, infos: list[TensorInfo]) -> None:
    """Tensors that share bytes would make a slice larger than its source, without a limit."""
    ordered = sorted(infos, key=lambda info: info.offset)
    for first, second in itertools.pairwise(ordered):
        if first.offset + first.nbytes > second.offset:
            cursor.fail(f"damaged: tensors {show(first.name)} and {show(second.name)} overlap")


def _read_preamble(cursor: Cursor) -> int:
    magic = cursor.take(min(4, cursor.size), "the magic")
    if magic != b"GGUF":
        if magic == b"vers":
            cursor.fail("not a GGUF file; it looks like a Git LFS pointer, fetch the real file")
        cursor.fail(f"not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        cursor.fail("big-endian GGUF files are not supported; convert it to little endian")
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version} is not supported, versions 2 and 3 are")
    return version


def _check_count(cursor: Cursor, what: str, count: int, limit: int, smallest: int) -> None:
    if count > limit:
        cursor.fail(f"damaged: the header claims {count} {what}, the limit is {limit}")
    cursor.expect(count * smallest, f"a list of {count} {what}")


def _read_metadata(cursor: Cursor, count: int, stamp: FileStamp) -> dict[str, Metadata]:
    metadata: dict[str, Metadata] = {}
    text_budget = MAX_TEXT
    for _ in range(count):
        start = cursor.position
        key = _name(cursor, "a metadata key", min(MAX_KEY, text_budget))
        text_budget -= cursor.position - start
        if text_budget < 0:
            cursor.fail(
                f"damaged: its metadata keys and texts have over {MAX_TEXT} bytes, which is the limit"
            )
        if key in metadata:
            cursor.fail(f"damaged: metadata key {show(key)} occurs twice")
        kind = _value_type(cursor, key)
        value: Scalar | LazyArray
        if kind is ValueType.ARRAY:
            value = _read_array(cursor, key, stamp)
        elif kind is ValueType.STRING:
            raw = cursor.string(f"metadata key {show(key)}", min(MAX_STRING, text_budget))
            text_budget -= len(raw)
            value = raw.decode("utf-8", "replace")
        else:
            form = SCALARS[kind]
            value = form.unpack(cursor.take(form.size, f"metadata key {show(key)}"))[0]
        metadata[key] = Metadata(key, kind, value, start, cursor.position)
    return metadata


def _name(cursor: Cursor, what: str, limit: int) -> str:
    try:
        return cursor.string(what, limit).decode("utf-8")
    except UnicodeDecodeError:
        cursor.fail(f"damaged: {what} before byte {cursor.position} is not UTF-8")


def _value_type(cursor: Cursor, key: str) -> ValueType:
    number = cursor.u32(f"the type of {show(key)}")
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"damaged: metadata key {show(key)} has unknown type {number}")


def _read_array(cursor: Cursor, key: str, stamp: FileStamp) -> LazyArray:
    element = _value_type(cursor, key)
    count = cursor.u64(f"the length of {show(key)}")
    what = f"array {show(key)} of {count} elements"
    start = cursor.position
    if element is ValueType.ARRAY:
        cursor.fail(f"metadata key {show(key)} is an array of arrays, which GGUF readers do not support")
    if element is ValueType.STRING:
        if count > MAX_STRINGS:
            cursor.fail(f"damaged: {what}, the limit for texts is {MAX_STRINGS}")
        cursor.expect(count * 8, what)
        cursor.skip_strings(count, what)
    else:
        cursor.skip(count * SCALARS[element].size, what)
    return LazyArray(element, count, start, cursor.position - start, stamp)


def _alignment(cursor: Cursor, metadata: Mapping[str, Metadata]) -> int:
    entry = metadata.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.value
    if entry.type is not ValueType.UINT32 or not isinstance(value, int):
        cursor.fail(f"damaged: general.alignment is {entry.type.name}, expected UINT32")
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        cursor.fail(f"damaged: alignment {value} is not a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_tensor_infos(cursor: Cursor, count: int, alignment: int, stamp: FileStamp) -> list[TensorInfo]:
    infos: list[TensorInfo] = []
    seen: set[str] = set()
    for _ in range(count):
        name = _name(cursor, "a tensor name", MAX_TENSOR_NAME)
        if name in seen:
            cursor.fail(f"damaged: tensor {show(name)} occurs twice")
        seen.add(name)
        rank = cursor.u32(f"the rank of tensor {show(name)}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            cursor.fail(f"damaged: tensor {show(name)} has {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")
        dims = tuple(cursor.u64(f"the shape of tensor {show(name)}") for _ in range(rank))
        if 0 in dims or math.prod(dims) >= 1 << 63:
            cursor.fail(f"damaged: tensor {show(name)} has the impossible shape {list(dims)}")
        type_id = cursor.u32(f"the type of tensor {show(name)}")
        offset = cursor.u64(f"the offset of tensor {show(name)}")
        if offset % alignment:
            cursor.fail(f"damaged: tensor {show(name)} is at offset {offset}, not a multiple of {alignment}")
        try:
            nbytes = tensor_bytes(type_id, dims)
        except ValueError as error:
            cursor.fail(f"tensor {show(name)}: {error}")
        infos.append(TensorInfo(name, dims, type_id, offset, nbytes, stamp))
    return infos

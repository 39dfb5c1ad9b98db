"""A GGUF file as it is going to be, laid out before anything of it is written."""

from __future__ import annotations

import struct

import attrs

from skippy.models.gguf import GGUFHeader, TensorInfo
from skippy.models.metadata import Entry, text_bytes


@attrs.frozen(slots=True)
class PlannedTensor:
    """A tensor of the file: copied from ``source``, or a hole of zeros when that is None."""

    name: str
    dims: tuple[int, ...]
    type: int
    nbytes: int
    source: TensorInfo | None


def copied(tensor: TensorInfo, name: str) -> PlannedTensor:
    """A tensor of another file, byte for byte, under a name of its own."""
    return PlannedTensor(name, tensor.dims, tensor.type, tensor.nbytes, tensor)


@attrs.frozen(slots=True, eq=False)
class FilePlan:
    """A file to be written.

    Attributes:
        header: of the source; says the alignment, too.
        metadata: entries, either the source's own (copied byte for byte) or encoded anew.
        tensors: in file order.
    """

    header: GGUFHeader
    metadata: tuple[Entry, ...]
    tensors: tuple[PlannedTensor, ...]

    def padded(self, size: int) -> int:
        """``size`` rounded up to the file's alignment."""
        return size + -size % self.header.alignment

    @property
    def data_offset(self) -> int:
        """File offset of the tensor data."""
        size = 24 + sum(len(e) if isinstance(e, bytes) else e.end - e.start for e in self.metadata)
        return self.padded(size + len(self.tensor_infos()))

    @property
    def file_bytes(self) -> int:
        """Length of the file, holes included."""
        return self.data_offset + sum(self.padded(t.nbytes) for t in self.tensors)

    @property
    def disk_bytes(self) -> int:
        """Bytes written, holes excluded; a file system rounds up to its blocks."""
        return self.data_offset + sum(self.padded(t.nbytes) for t in self.tensors if t.source)

    def preamble(self) -> bytes:
        """Magic, version 3 and counts."""
        return struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.metadata))

    def tensor_infos(self) -> bytes:
        """The encoded list of tensors, with offsets from the start of the data."""
        out, offset = bytearray(), 0
        for tensor in self.tensors:
            out += text_bytes(tensor.name) + struct.pack("<I", len(tensor.dims))
            out += struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.type, offset)
            offset += self.padded(tensor.nbytes)
        return bytes(out)

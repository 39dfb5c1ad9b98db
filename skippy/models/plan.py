"""What a slice file will contain, decided without writing anything.

The general rules, the same for every family:

* The slice's layers are renumbered from 0; ``block_count`` follows; arrays with one entry per layer are cut
  alike.
* A slice that is not the last gets one spare layer behind its own: same shapes, all zero, a hole in the file.
  The boundary is read in front of it and it is never computed; thanks to it no row needs an output flag.
* The first slice has the embedding and no head (a hole where llama.cpp insists on one), the last has norm and
  head (and an embedding, real if tied, else a hole), those between have no vocabulary and one embedding row.
"""

from __future__ import annotations

import struct

import attrs

from skippy.models.errors import GGUFError, LayerRangeError
from skippy.models.families import Family, family_of
from skippy.models.gguf import (
    SCALARS,
    GGUFHeader,
    LazyArray,
    Metadata,
    Scalar,
    TensorInfo,
    ValueType,
)
from skippy.models.info import (
    SLICE_PREFIX,
    is_slice,
    is_tied,
    layer_count,
    refuse_shards,
    split_layer_name,
    vocabulary_size,
)
from skippy.models.tensor_types import tensor_bytes

RULES_VERSION = 1
"""Raised whenever the same range of the same file would give another slice."""

# Arrays under the architecture's prefix that may be as long as the layer list without being per layer.
_NOT_PER_LAYER = ("rope.dimension_sections", "classifier.output_labels")


@attrs.frozen(slots=True)
class PlannedTensor:
    """A tensor of the slice: copied from ``source``, or a hole of zeros when that is None."""

    name: str
    dims: tuple[int, ...]
    type: int
    nbytes: int
    source: TensorInfo | None


@attrs.frozen(slots=True, eq=False)
class SlicePlan:
    """A slice to be written.

    Attributes:
        header: of the source.
        layer_start, layer_end, layer_count: as in :class:`~skippy.models.SliceInfo`.
        spare_layers: all-zero layers behind the real ones.
        boundary_node: node of the output boundary, None for a last slice.
        metadata: entries, either the source's own (copied byte for byte) or encoded anew.
        tensors: in file order.
    """

    header: GGUFHeader
    layer_start: int
    layer_end: int
    layer_count: int
    spare_layers: int
    boundary_node: str | None
    metadata: tuple[Metadata | bytes, ...]
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
            out += _text(tensor.name) + struct.pack("<I", len(tensor.dims))
            out += struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.type, offset)
            offset += self.padded(tensor.nbytes)
        return bytes(out)


def plan_slice(header: GGUFHeader, layer_start: int, layer_end: int, *, source_sha256: str = "") -> SlicePlan:
    """Decide what the slice ``[layer_start, layer_end)`` of a whole model contains.

    ``source_sha256`` goes into the slice's metadata. The whole range gives a plain copy for any architecture.

    Raises:
        LayerRangeError: no such range, or ``header`` is itself a slice.
        UnsupportedArchitectureError: the family cannot be cut.
        GGUFError: a shard of a model, or a file whose layers are incomplete.
    """
    refuse_shards(header)
    count = layer_count(header)
    check_range(header, layer_start, layer_end)
    last = layer_end == count
    family = None if layer_start == 0 and last else family_of(header)
    boundary = None if last or family is None else family.boundary.format(layer_end - layer_start - 1)
    spare = 0 if last else 1
    picks = (*range(layer_start, layer_end), *[layer_end - 1] * spare)
    keys: dict[str, Scalar] = {
        "layer_start": layer_start,
        "layer_end": layer_end,
        "layer_count": count,
        "spare_layers": spare,
        "vocab_size": vocabulary_size(header),
        "rules_version": RULES_VERSION,
        "tied": is_tied(header),
        "boundary": boundary or "",
        "source_sha256": source_sha256,
    }
    own = tuple(_entry(SLICE_PREFIX + key, value) for key, value in keys.items())
    if family is None:
        metadata: tuple[Metadata | bytes, ...] = tuple(header.metadata.values())
        tensors = tuple(_copied(tensor, tensor.name) for tensor in header.tensors.values())
    else:
        metadata = _plan_metadata(header, picks, layer_start > 0 and not last)
        tensors = _plan_tensors(header, family, layer_start, layer_end, count)
    return SlicePlan(header, layer_start, layer_end, count, spare, boundary, metadata + own, tensors)


def slice_bytes(header: GGUFHeader, layer_start: int, layer_end: int) -> int:
    """Bytes a slice would take on disk, without writing it. Raises as :func:`plan_slice`."""
    return plan_slice(header, layer_start, layer_end, source_sha256="0" * 64).disk_bytes


def check_range(header: GGUFHeader, layer_start: int, layer_end: int) -> None:
    """Raise LayerRangeError unless ``[layer_start, layer_end)`` can be cut from this file."""
    asked = f"layers {layer_start}:{layer_end}"
    if is_slice(header):
        have = [header.count(f"{SLICE_PREFIX}layer_{end}") for end in ("start", "end", "count")]
        raise LayerRangeError(
            f"{header.path}: {asked} cannot be cut from it, it is itself a slice "
            f"({have[0]}:{have[1]} of {have[2]} layers); use the whole model"
        )
    count = layer_count(header)
    if not 0 <= layer_start < layer_end <= count:
        raise LayerRangeError(
            f"{header.path}: there is no range {asked}; the model has {count} layers, "
            f"valid is START:END with 0 <= START < END <= {count}"
        )


def _plan_metadata(header: GGUFHeader, picks: tuple[int, ...], middle: bool) -> tuple[Metadata | bytes, ...]:
    prefix = header.text("general.architecture") + "."
    blocks, vocab = prefix + "block_count", prefix + "vocab_size"
    out: list[Metadata | bytes] = []
    for key, entry in header.metadata.items():
        if key.startswith("split.") or (middle and (key.startswith("tokenizer.") or key == vocab)):
            continue
        if key == blocks:
            out.append(_entry(key, len(picks), entry.type))
        elif isinstance(entry.value, LazyArray) and _is_per_layer(key, prefix, entry.value, header):
            out.append(_picked(key, entry.value, picks))
        else:
            out.append(entry)
    if middle:
        out.append(_entry(vocab, 1))
        out.append(_entry("tokenizer.ggml.model", "no_vocab"))
    return tuple(out)


def _is_per_layer(key: str, prefix: str, array: LazyArray, header: GGUFHeader) -> bool:
    if not key.startswith(prefix) or key.removeprefix(prefix) in _NOT_PER_LAYER:
        return False
    return len(array) >= header.count(prefix + "block_count")


def _plan_tensors(
    header: GGUFHeader, family: Family, start: int, end: int, count: int
) -> tuple[PlannedTensor, ...]:
    first, last = start == 0, end == count
    layers: list[PlannedTensor] = []
    spare: list[PlannedTensor] = []
    others: list[PlannedTensor] = []
    present: set[int] = set()
    for tensor in header.tensors.values():
        place = split_layer_name(tensor.name)
        if place is None:
            others += _plan_outer(tensor, family, first, last, is_tied(header))
            continue
        index, rest = place
        if start <= index < end:
            present.add(index)
            layers.append(_copied(tensor, f"blk.{index - start}.{rest}"))
            if index == end - 1 and not last:
                spare.append(_hole(tensor, f"blk.{end - start}.{rest}"))
    if "token_embd.weight" not in header.tensors:
        raise GGUFError(header.path, "damaged: there is no tensor 'token_embd.weight'")
    missing = set(range(start, end)) - present
    if missing:
        raise GGUFError(header.path, f"damaged: there are no tensors of layer {min(missing)}")
    return (*others, *layers, *spare)


def _plan_outer(
    tensor: TensorInfo, family: Family, first: bool, last: bool, tied: bool
) -> list[PlannedTensor]:
    """A tensor outside the layers: copied, a hole, or left out."""
    name, middle = tensor.name, not first and not last
    if name == "token_embd.weight":
        if first or (last and tied):
            return [_copied(tensor, name)]
        return [_hole(tensor, name, one_row=middle)]
    if name.startswith("output.") and not last:
        return [_hole(tensor, name, one_row=middle)] if family.output_required else []
    return [_copied(tensor, name)]


def _copied(tensor: TensorInfo, name: str) -> PlannedTensor:
    return PlannedTensor(name, tensor.dims, tensor.type, tensor.nbytes, tensor)


def _hole(tensor: TensorInfo, name: str, *, one_row: bool = False) -> PlannedTensor:
    dims = tensor.dims
    if one_row and (len(dims) > 1 or tensor.nbytes == 4 * dims[0]):  # a row of blocks cannot be cut
        dims = (*dims[:-1], 1)
    return PlannedTensor(name, dims, tensor.type, tensor_bytes(tensor.type, dims), None)


def _text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _entry(key: str, value: Scalar, kind: ValueType | None = None) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", ValueType.STRING) + _text(value)
    if kind is None:
        kind = ValueType.BOOL if isinstance(value, bool) else ValueType.UINT32
    return _text(key) + struct.pack("<I", kind) + SCALARS[kind].pack(value)


def _picked(key: str, array: LazyArray, picks: tuple[int, ...]) -> bytes:
    head = _text(key) + struct.pack("<IIQ", ValueType.ARRAY, array.element_type, len(picks))
    elements = [array.raw(index) for index in picks]
    if array.element_type is ValueType.STRING:
        elements = [_text(raw) for raw in elements]
    return head + b"".join(elements)

"""What a slice file will contain, decided without writing anything.

The general rules, the same for every family:

* The slice's layers are renumbered from 0, with spare ones around them (:mod:`skippy.models.layers`): same
  shapes as a layer of the model, all zero, holes in the file.
* The metadata follows (:mod:`skippy.models.metadata`).
* The first slice has the embedding and no head (a hole where llama.cpp insists on one), the last has norm and
  head (and an embedding, real if tied, else a hole), those between have no vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from skippy.models.boundary import MOST_PARTS, MOST_VALUES, BoundaryPart, format_parts, total_width
from skippy.models.errors import CutError, GGUFError, LayerRangeError, UnsupportedArchitectureError
from skippy.models.families import Family, family_of
from skippy.models.gguf import GGUFHeader, Scalar, TensorInfo
from skippy.models.info import (
    SLICE_PREFIX,
    SliceInfo,
    hidden_size,
    is_slice,
    is_tied,
    layer_count,
    refuse_shards,
    split_layer_name,
    vocabulary_size,
)
from skippy.models.layers import MOST_LAYERS, Picks, check_cut, entry_node, pick_layers
from skippy.models.layout import FilePlan, PlannedTensor, copied
from skippy.models.metadata import Entry, entry, lookup_layers, plan_metadata
from skippy.models.tensor_types import tensor_bytes

RULES_VERSION = 2
"""Raised whenever the same range of the same file would give another slice."""


@attrs.frozen(slots=True, eq=False, kw_only=True)
class SlicePlan(FilePlan):
    """A slice to be written.

    Attributes:
        layer_start, layer_end, layer_count: as in :class:`~skippy.models.SliceInfo`.
        picks: its layers, spare ones included.
        inputs: nodes that the input boundary overwrites; empty where it is fed as embeddings, or tokens are.
        outputs: nodes of the output boundary; empty for a last slice.
        takes_tokens: it reads token ids beside the boundary.
        source_sha256: of the whole model; empty where that was not asked for.
    """

    layer_start: int
    layer_end: int
    layer_count: int
    picks: Picks
    inputs: tuple[BoundaryPart, ...]
    outputs: tuple[BoundaryPart, ...]
    takes_tokens: bool
    source_sha256: str

    def info(self, path: Path) -> SliceInfo:
        """What the slice is once it is written to ``path``: what reading it there would give."""
        header = self.header
        architecture = header.text("general.architecture")
        return SliceInfo(
            path=path,
            architecture=architecture,
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            layer_count=self.layer_count,
            front_layers=len(self.picks.front),
            spare_layers=len(self.picks.back),
            hidden_size=hidden_size(header),
            context_length=header.count(f"{architecture}.context_length", 0),
            vocab_size=vocabulary_size(header),
            inputs=self.inputs,
            outputs=self.outputs,
            takes_tokens=self.takes_tokens,
            tied=is_tied(header),
            source_sha256=self.source_sha256,
            file_bytes=self.file_bytes,
        )


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
    if layer_end - layer_start == count:
        picks = Picks((), tuple(range(count)), ())
        inputs: tuple[BoundaryPart, ...] = ()
        outputs: tuple[BoundaryPart, ...] = ()
        metadata: tuple[Entry, ...] = tuple(header.metadata.values())
        tensors = tuple(copied(tensor, tensor.name) for tensor in header.tensors.values())
        tokens = False
    else:
        family = family_of(header)
        for cut in {layer_start, layer_end} - {0, count}:
            check_cut(header, family, cut)
        picks = pick_layers(header, family, layer_start, layer_end, count)
        inputs, outputs = _boundaries(header, family, picks, layer_end == count)
        metadata = plan_metadata(header, family, picks, layer_start, count, last=layer_end == count)
        tensors = _plan_tensors(header, family, picks, count)
        tokens = layer_start > 0 and _takes_tokens(header, family, picks)
    keys: dict[str, Scalar] = {
        "layer_start": layer_start,
        "layer_end": layer_end,
        "layer_count": count,
        "front_layers": len(picks.front),
        "spare_layers": len(picks.back),
        "vocab_size": vocabulary_size(header),
        "rules_version": RULES_VERSION,
        "tied": is_tied(header),
        "input": format_parts(inputs),
        "boundary": format_parts(outputs),
        "takes_tokens": tokens,
        "source_sha256": source_sha256,
    }
    own = tuple(entry(SLICE_PREFIX + key, value) for key, value in keys.items())
    return SlicePlan(
        header=header,
        metadata=metadata + own,
        tensors=tensors,
        layer_start=layer_start,
        layer_end=layer_end,
        layer_count=count,
        picks=picks,
        inputs=inputs,
        outputs=outputs,
        takes_tokens=tokens,
        source_sha256=source_sha256,
    )


def _takes_tokens(header: GGUFHeader, family: Family, picks: Picks) -> bool:
    """Whether a later slice reads token ids beside the boundary."""
    if family.hash_tables:
        return picks.real[0] < header.count(f"{family.architecture}.hash_layer_count", 0)
    return family.token_rows or (family.lookups and bool(lookup_layers(header, picks)))


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


def _plan_tensors(header: GGUFHeader, family: Family, picks: Picks, count: int) -> tuple[PlannedTensor, ...]:
    start, end = picks.real[0], picks.real[-1] + 1
    needed = set(picks.all)
    by_layer: dict[int, list[tuple[TensorInfo, str]]] = {index: [] for index in needed}
    others: list[PlannedTensor] = []
    lookups = bool(lookup_layers(header, picks)) if family.lookups else True
    for tensor in header.tensors.values():
        place = split_layer_name(tensor.name)
        if place is None:
            if lookups or not tensor.name.startswith("per_layer_"):
                others += _plan_outer(header, tensor, family, start == 0, end == count)
        elif place[0] in needed:
            by_layer[place[0]].append((tensor, place[1]))
    if "token_embd.weight" not in header.tensors:
        raise GGUFError(header.path, "damaged: there is no tensor 'token_embd.weight'")
    missing = {index for index, tensors in by_layer.items() if not tensors}
    if missing:
        raise GGUFError(header.path, f"damaged: there are no tensors of layer {min(missing)}")
    layers: list[PlannedTensor] = []
    first, behind = len(picks.front), len(picks.computed)
    for position, index in enumerate(picks.all):
        real = first <= position < behind
        for tensor, rest in by_layer[index]:
            if not (family.lookups and rest.startswith("ple_") and not (real and lookups)):
                name = f"blk.{position}.{rest}"
                layers.append(copied(tensor, name) if real else _hole(tensor, name))
    return (*others, *layers)


def _plan_outer(
    header: GGUFHeader, tensor: TensorInfo, family: Family, first: bool, last: bool
) -> list[PlannedTensor]:
    """A tensor outside the layers: copied, a hole, or left out."""
    name = tensor.name
    if is_copied(name, family, first=first, last=last, tied=is_tied(header)):
        return [copied(tensor, name)]
    if name.startswith("output.") and not family.output_required:
        return []
    one_row = not first and not last and family.entry is None and not family.keeps_vocabulary
    return [_hole(tensor, name, one_row=one_row and name != "position_embd.weight")]


def is_copied(name: str, family: Family | None, *, first: bool, last: bool, tied: bool) -> bool:
    """Whether a slice has the values of a tensor outside the layers, not a hole or nothing."""
    if name == "token_embd.weight":
        return first or (last and tied) or (family is not None and family.token_rows)
    if name == "position_embd.weight":
        return first or (family is not None and family.entry is not None)  # else the first slice has added it
    return last or not name.startswith("output.")


def _hole(tensor: TensorInfo, name: str, *, one_row: bool = False) -> PlannedTensor:
    dims = tensor.dims
    if one_row and (len(dims) > 1 or tensor.nbytes == 4 * dims[0]):  # a row of blocks cannot be cut
        dims = (*dims[:-1], 1)
    return PlannedTensor(name, dims, tensor.type, tensor_bytes(tensor.type, dims), None)


def _boundaries(
    header: GGUFHeader, family: Family, picks: Picks, last: bool
) -> tuple[tuple[BoundaryPart, ...], tuple[BoundaryPart, ...]]:
    """The nodes that the input goes to, and those that the output is read from."""
    start, end = picks.real[0], picks.real[-1] + 1
    node = entry_node(family, picks, start)
    inputs = () if node is None else _boundary(header, family, start, node)
    if last:
        return inputs, ()
    return inputs, _boundary(header, family, end, family.boundary.format(len(picks.computed) - 1))


def _boundary(header: GGUFHeader, family: Family, cut: int, node: str) -> tuple[BoundaryPart, ...]:
    """What crosses in front of layer ``cut``: the residual stream at ``node``, and what else is needed."""
    width = hidden_size(header)
    prefix = family.architecture
    copies = header.count(f"{prefix}.{family.copies}", 1) if family.copies else 1
    parts: list[BoundaryPart] = []
    if family.banks:
        every = header.count(f"{prefix}.{family.banks}", 0)
        inputs = range(0, cut, every) if every else range(0)
        if len(inputs) >= MOST_PARTS:
            raise CutError(
                prefix, f"{len(inputs)} inputs of earlier layers would cross, at most {MOST_PARTS - 1} do"
            )
        # A slice has all layers in front of the cut, real or spare, so these nodes are where they were.
        parts += [BoundaryPart(family.boundary.format(i - 1) if i else "inp_embd", width) for i in inputs]
    parts.append(BoundaryPart(node, width * max(1, copies)))  # last, as it is computed last
    if total_width(parts) > MOST_VALUES:
        raise CutError(
            family.architecture, f"a row of {total_width(parts)} values would cross, at most {MOST_VALUES} do"
        )
    return tuple(parts)


def possible_cuts(header: GGUFHeader) -> tuple[int, ...]:
    """Layers at which a whole model may be cut, ascending; none where its family cannot be.

    Raises:
        GGUFError: the file is damaged.
    """
    count = layer_count(header)
    cuts: list[int] = []
    for cut in range(1, count if count <= MOST_LAYERS else 0):
        try:
            for start, end in ((0, cut), (cut, count)):
                family = family_of(header)
                check_cut(header, family, cut)
                _boundaries(header, family, pick_layers(header, family, start, end, count), end == count)
        except UnsupportedArchitectureError:
            continue
        cuts.append(cut)
    return tuple(cuts)

"""What a model is, for people."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import attrs

from skippy.models.errors import UnsupportedArchitectureError, printable
from skippy.models.families import family_of
from skippy.models.gguf import GGUFHeader
from skippy.models.info import SliceInfo, is_slice, layer_count, split_layer_name
from skippy.models.package import read_model
from skippy.models.plan import possible_cuts


@attrs.frozen(slots=True, kw_only=True)
class ModelSummary:
    """What ``skippy inspect`` shows.

    Attributes:
        slice: identity, layer range and sizes of the file.
        name: ``general.name``, or the file's stem; printable, at most 200 characters.
        parameters: weights in the file.
        quantisation: bytes of tensor data by ggml type name, largest first.
        bytes_per_layer: tensor bytes of each layer in the file, spare layers included.
        other_bytes: tensor bytes outside the layers (embedding, norms, head).
        tokenizer: kind of the tokenizer (``tokenizer.ggml.model``), or None; printable.
        template: characters of the chat template; None where there is none.
        files: files that the model is in.
        cuts: layers at which the model may be cut.
        unsplittable: why it may not be cut at all, or None.
    """

    slice: SliceInfo
    name: str
    parameters: int
    quantisation: Mapping[str, int]
    bytes_per_layer: tuple[int, ...]
    other_bytes: int
    tokenizer: str | None
    template: int | None
    files: int
    cuts: tuple[int, ...]
    unsplittable: str | None


def inspect_model(path: str | os.PathLike[str]) -> ModelSummary:
    """Summarise a model, a slice or a layer package from its header alone.

    Raises:
        GGUFError: as :meth:`SliceInfo.from_file`.
    """
    header = read_model(path)
    info = SliceInfo.from_header(header)
    layers = [0] * layer_count(header)
    kinds: Counter[str] = Counter()
    other = 0
    for tensor in header.tensors.values():
        kinds[tensor.type_name] += tensor.nbytes
        place = split_layer_name(tensor.name)
        if place is not None and place[0] < len(layers):
            layers[place[0]] += tensor.nbytes
        else:
            other += tensor.nbytes
    cuts = () if is_slice(header) else possible_cuts(header)
    template = header.value("tokenizer.chat_template")
    tokenizer = header.value("tokenizer.ggml.model")
    return ModelSummary(
        slice=info,
        name=printable(header.text("general.name", header.path.stem)),
        parameters=sum(tensor.elements for tensor in header.tensors.values()),
        quantisation=dict(kinds.most_common()),
        bytes_per_layer=tuple(layers),
        other_bytes=other,
        tokenizer=printable(tokenizer) if isinstance(tokenizer, str) else None,
        template=len(template) if isinstance(template, str) else None,
        files=len(header.files),
        cuts=cuts,
        unsplittable=None if cuts else _why_not(header, info),
    )


def _why_not(header: GGUFHeader, info: SliceInfo) -> str | None:
    if is_slice(header):
        return f"already a slice, layers {info.layer_start}:{info.layer_end} of {info.layer_count}"
    if info.layer_count < 2:
        return "it has a single layer"
    try:
        family_of(header)
    except UnsupportedArchitectureError as error:
        return str(error)
    return "there is no layer at which all that a later one needs would cross"

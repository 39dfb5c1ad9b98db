"""The metadata of a slice: the source's, renumbered, with what depended on the layer count written out."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from skippy.models.families import Family
from skippy.models.gguf import SCALARS, GGUFHeader, LazyArray, Metadata, Scalar, ValueType
from skippy.models.layers import (
    LEADING_COUNTS,
    Picks,
    per_layer,
    recurrent_layers,
    window_pattern,
)

Entry = Metadata | bytes

# Arrays under the architecture's prefix that may be as long as the layer list without being per layer.
NOT_PER_LAYER = ("rope.dimension_sections", "classifier.output_labels", "ple.")
_IMAGES = ("n_deepstack_layers", "deepstack_mapping")
"""What a model of images adds to the first layers: nothing for text, but rows of the input would be wider."""


def text_bytes(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value: Scalar, kind: ValueType | None = None) -> bytes:
    """One encoded key and value."""
    if isinstance(value, str):
        return text_bytes(key) + struct.pack("<I", ValueType.STRING) + text_bytes(value)
    if kind is None:
        kind = ValueType.BOOL if isinstance(value, bool) else ValueType.UINT32
    return text_bytes(key) + struct.pack("<I", kind) + SCALARS[kind].pack(value)


def array_entry(key: str, values: Sequence[Scalar], kind: ValueType) -> bytes:
    """One encoded key and array of numbers."""
    head = text_bytes(key) + struct.pack("<IIQ", ValueType.ARRAY, kind, len(values))
    return head + b"".join(SCALARS[kind].pack(value) for value in values)


def plan_metadata(
    header: GGUFHeader, family: Family, picks: Picks, start: int, count: int, *, last: bool
) -> tuple[Entry, ...]:
    """The entries of a slice, without those that say which slice it is.

    Args:
        header: of the whole model.
        family: its rules.
        picks: the slice's layers.
        start: its first real layer.
        count: layers of the whole model.
        last: it has the head.
    """
    prefix = family.architecture + "."
    later, middle = start > 0, start > 0 and not last
    values = _explicit(header, family, count, later=later)
    no_vocabulary = middle and not family.keeps_vocabulary
    replaced = {*values, "vocab_size"} if no_vocabulary else set(values)
    own = ("ple.",) if family.lookups else ()
    out: list[Entry] = []
    for key, found in header.metadata.items():
        name = key.removeprefix(prefix) if key.startswith(prefix) else None
        if key.startswith("split.") or (no_vocabulary and key.startswith("tokenizer.")):
            continue
        if name is None:
            out.append(found)
        elif name == "block_count":
            out.append(entry(key, len(picks.all)))  # as llama.cpp wants it, whatever the file has
        elif name in LEADING_COUNTS and isinstance(found.value, int):
            leading = sum(index < found.value for index in picks.all)
            out.append(entry(key, leading, found.type))
        elif name == "nextn_predict_layers":
            out.append(entry(key, 0, found.type))
        elif name in replaced or name.startswith(own):
            continue
        elif name in _IMAGES:
            if name == "n_deepstack_layers" and header.count(key) >= 0:  # raises unless it is a number
                out.append(entry(key, 0, found.type))
        elif isinstance(found.value, LazyArray) and _is_per_layer(name, found.value, header, prefix):
            out.append(_picked(key, found.value, picks.all))
        else:
            out.append(found)
    for name, value in values.items():
        out.append(value(prefix + name, picks.all))
    if family.lookups:
        out += _lookups(header, prefix, picks)
    if no_vocabulary:
        size = 1 if family.entry is None else _vocabulary(header, prefix)
        out += [entry(prefix + "vocab_size", size), entry("tokenizer.ggml.model", "no_vocab")]
    return tuple(out)


Written = Callable[[str, Sequence[int]], bytes]


def _explicit(header: GGUFHeader, family: Family, count: int, *, later: bool) -> dict[str, Written]:
    """Keys whose values, or defaults, depend on the index of a layer or on how many there are."""
    prefix = family.architecture + "."
    out: dict[str, Written] = {}

    def array(name: str, values: Sequence[Scalar]) -> None:
        kind = _element_type(header, prefix + name)
        out[name] = lambda key, picks: array_entry(key, [values[i] for i in picks], kind)

    def scalar(name: str, value: Scalar, kind: ValueType) -> None:
        out[name] = lambda key, _picks: entry(key, value, kind)

    windows = window_pattern(header, family, count)
    if windows is not None:
        array("attention.sliding_window_pattern", windows)
    if family.interval:
        array("attention.recurrent_layers", recurrent_layers(header, family, count) or ())
    heads = per_layer(header, prefix + "attention.head_count", count)
    if heads is not None and not family.empty_layers and not all(heads):
        largest = max(number for number in heads if isinstance(number, int))
        array("attention.head_count", [number or largest for number in heads])
    if family.architecture == "minicpm":
        width = header.count(prefix + "embedding_length")
        defaults = {
            "residual_scale": float(np.float32(1.4) / np.sqrt(np.float32(count))),
            "logit_scale": 256.0 / max(1, width),
        }
        for name, value in {"embedding_scale": 12.0, **defaults}.items():
            if header.value(prefix + name) is None:
                scalar(name, value, ValueType.FLOAT32)
    if family.architecture == "deepseek2":
        if header.value(prefix + "attention.q_lora_rank") is None:
            scalar("attention.q_lora_rank", 0, ValueType.UINT32)
        if not header.value(prefix + "expert_gating_func"):
            sigmoid = count == 47 and _vocabulary(header, prefix) == 154_880
            scalar("expert_gating_func", 2 if sigmoid else 1, ValueType.UINT32)
    if later and family.entry is None and (family.zero_scale or header.value(prefix + "embedding_scale")):
        scalar("embedding_scale", 0.0, ValueType.FLOAT32)
    return out


def _element_type(header: GGUFHeader, key: str) -> ValueType:
    value = header.value(key)
    return value.element_type if isinstance(value, LazyArray) else ValueType.UINT32


def _vocabulary(header: GGUFHeader, prefix: str) -> int:
    tokens = header.value("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, LazyArray) else header.count(prefix + "vocab_size", 0)


def lookup_layers(header: GGUFHeader, picks: Picks) -> tuple[int, ...]:
    """Where in a slice are the real layers that look tables up by token id (``ple.layers``)."""
    value = header.value(f"{header.text('general.architecture')}.ple.layers")
    if not isinstance(value, LazyArray) or len(value) > 1 << 16:
        return ()
    wanted, shift = set(value), len(picks.front)
    return tuple(shift + place for place, index in enumerate(picks.real) if index in wanted)


def _lookups(header: GGUFHeader, prefix: str, picks: Picks) -> list[Entry]:
    own = lookup_layers(header, picks)
    if not own:
        return []
    out: list[Entry] = []
    for key, found in header.metadata.items():
        if key == f"{prefix}ple.layers":
            assert isinstance(found.value, LazyArray)
            out.append(array_entry(key, own, found.value.element_type))
        elif key.startswith(f"{prefix}ple."):
            out.append(found)
    return out


def _is_per_layer(name: str, array: LazyArray, header: GGUFHeader, prefix: str) -> bool:
    if name.startswith(NOT_PER_LAYER):
        return False
    return len(array) >= header.count(prefix + "block_count")


def _picked(key: str, array: LazyArray, picks: Sequence[int]) -> bytes:
    head = text_bytes(key) + struct.pack("<IIQ", ValueType.ARRAY, array.element_type, len(picks))
    wanted = {index: array.raw(index) for index in set(picks)}
    elements = [wanted[index] for index in picks]
    if array.element_type is ValueType.STRING:
        elements = [text_bytes(raw) for raw in elements]
    return head + b"".join(elements)

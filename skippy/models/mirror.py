"""A small random model like a given one: as deep, with its metadata and its tensors, at other widths.

Widths, numbers of heads, experts and states are those of the architecture's model in ``tiny.json``, which
llama.cpp is known to take; what differs from layer to layer, and all that is no size, is as in the file.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from gguf import GGUFValueType

from skippy.models.errors import ModelError
from skippy.models.gguf import GGUFHeader, LazyArray, Metadata
from skippy.models.info import split_layer_name
from skippy.models.layers import MOST_LAYERS
from skippy.models.metadata import NOT_PER_LAYER
from skippy.models.shape import DECIDING
from skippy.models.tiny import TinyModel, Value, tiny_architecture, tiny_data, tiny_models, tiny_part

MOST_BYTES = 4 << 30
"""Of the weights of such a model; one of 100 layers mostly has 300 MB."""
_MOST_ENTRIES = 4096

_SIZES_NAMES = (
    "attention.decay_lora_rank attention.gate_lora_rank attention.group_norm_groups attention.head_count "
    "attention.head_count_kv attention.iclr_lora_rank attention.indexer.block_size "
    "attention.indexer.head_count attention.indexer.key_length attention.indexer.kpool "
    "attention.indexer.local_blocks attention.indexer.top_k attention.key_length attention.key_length_mla "
    "attention.key_length_mla_swa attention.key_length_swa attention.kv_lora_rank "
    "attention.kv_lora_rank_swa attention.output_group_count attention.output_lora_rank "
    "attention.q_lora_rank attention.sliding_window attention.value_length attention.value_length_mla "
    "attention.value_length_mla_swa attention.value_length_swa attention.value_residual_mix_lora_rank "
    "context_length dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out embedding_length "
    "embedding_length_out embedding_length_per_layer_input expert_chunk_feed_forward_length expert_count "
    "expert_feed_forward_length expert_group_count expert_group_used_count expert_latent_length "
    "expert_shared_count expert_shared_feed_forward_length expert_used_count experts_per_group "
    "feed_forward_length hyper_connection.count hyper_connection.low_rank kda.head_dim "
    "rope.dimension_count rope.dimension_count_swa rope.dimension_sections "
    "rope.scaling.original_context_length shortconv.l_cache ssm.conv_kernel ssm.group_count "
    "ssm.inner_size ssm.state_size ssm.time_step_rank time_decay_extra_dim time_mix_extra_dim "
    "token_shift_count wkv.head_size"
)
_SIZES = frozenset(_SIZES_NAMES.split())
_ABSENT_STAYS_ABSENT = ("expert", "attention.q_lora_rank", "attention.sliding_window")
_UNKNOWN = {
    "attention.sliding_window": 32,
    "expert_count": 2,
    "expert_feed_forward_length": 384,
    "expert_shared_count": 1,
    "expert_used_count": 2,
    "rope.dimension_sections": 32,
}
"""Sizes for a file that has what the architecture's small model has not."""


class MirrorError(ModelError):
    """There is no telling how a small model like this one would have to look."""


def tiny_like(header: GGUFHeader, *, closely: bool = True) -> TinyModel:
    """A small model like this one.

    Args:
        header: of a whole model.
        closely: with just the file's tensors and keys. Otherwise with those of the architecture's small
            model, and what decides on slicing as in the file.

    Raises:
        MirrorError: a tensor of unknown shape, an unknown architecture, or too many layers.
        GGUFError: the file is damaged.
    """
    mirror = _Mirror.of(header)
    model = TinyModel(
        architecture=mirror.architecture,
        vocabulary=mirror.spec.get("vocabulary", 128),
        metadata=mirror.metadata() if closely else mirror.rough_metadata(),
        tensors=dict(mirror.tensors() if closely else mirror.rough_tensors()),
    )
    if model.nbytes > MOST_BYTES:
        raise MirrorError(f"a small model like it would have {model.nbytes >> 20} MiB")
    return model


Shape = tuple[int, ...]
Part = Mapping[str, Shape]


@attrs.define(eq=False, slots=False)
class _Mirror:
    """What is known while such a model is made.

    Attributes:
        spec: the architecture's own small model.
        sizes: that model's metadata.
        blocks: layers, with those for multi-token prediction.
        outer: names of the file's tensors outside the layers.
        layers: names of each layer's tensors, without the layer.
        known: shapes of the small model for tensors of the file.
    """

    header: GGUFHeader
    architecture: str
    spec: Mapping[str, Any]
    sizes: Mapping[str, Any]
    blocks: int
    outer: list[str]
    layers: list[list[str]]
    known: dict[str, Shape] = attrs.field(factory=dict)

    @classmethod
    def of(cls, header: GGUFHeader) -> _Mirror:
        architecture = header.text("general.architecture")
        names = [name for name in tiny_models() if tiny_architecture(name) == architecture]
        if not names:
            raise MirrorError("there is no small model of its architecture")
        blocks = header.count(f"{architecture}.block_count")
        if blocks > MOST_LAYERS:
            raise MirrorError(f"it has {blocks} layers")
        experts = bool(header.value(f"{architecture}.expert_count"))
        specs = [tiny_data()["families"][name] for name in names]
        spec = next((found for found in specs if bool(_size(found, "expert_count")) == experts), specs[0])
        outer: list[str] = []
        layers: list[list[str]] = [[] for _ in range(blocks)]
        for name in header.tensors:
            place = split_layer_name(name)
            if place is None:
                outer.append(name)
            elif place[0] < blocks:
                layers[place[0]].append(place[1])
        sizes = {**tiny_data()["metadata"], **spec["metadata"]}
        mirror = cls(header, architecture, spec, sizes, blocks, outer, layers)
        mirror._learn()
        return mirror

    @property
    def _embedding(self) -> int:
        return int(self.sizes["embedding_length"])

    @property
    def _predicting(self) -> int:
        return min(self.blocks - 1, self.header.count(f"{self.architecture}.nextn_predict_layers", 0))

    def _parts(self, layer: int) -> Iterable[Part]:
        """The two parts of the architecture's small model that a layer of the file is most like."""
        rest = set(self.layers[layer])
        for kind in ("mixers", "ffns"):
            part = max(map(_part, self.spec[kind]), key=lambda part: _likeness(rest, part))
            if _likeness(rest, part) > 0 or not part:
                rest -= set(part)
                yield part

    def _learn(self) -> None:
        """Shapes of the tensors that the architecture's small model has as well."""
        outer = _part(self.spec["other"])
        self.known |= {name: outer[name] for name in self.outer if name in outer}
        for layer, names in enumerate(self.layers):
            for part in self._parts(layer):
                self.known |= {f"blk.{layer}.{name}": part[name] for name in names if name in part}

    def tensors(self) -> Iterable[tuple[str, Shape]]:
        """Those of the file."""
        for name in self.outer:
            yield name, self.known.get(name) or self._guess(name, name)
        for layer, names in enumerate(self.layers):
            for name in names:
                full = f"blk.{layer}.{name}"
                yield full, self.known.get(full) or self._guess(full, name)

    def rough_tensors(self) -> Iterable[tuple[str, Shape]]:
        """Those of the architecture's small model, as many times as the file has layers like them."""
        for name, shape in _part(self.spec["other"]).items():
            if name != "output.weight" or name in self.outer:
                yield name, shape
        for layer in range(self.blocks - self._predicting):
            for part in self._parts(layer):
                for name, shape in part.items():
                    if not name.startswith("ple_") or name in self.layers[layer]:
                        yield f"blk.{layer}.{name}", shape

    def _guess(self, full: str, name: str) -> Shape:
        """A tensor that the architecture's small model has not."""
        weight = self.known.get(full.removesuffix(".bias") + ".weight")
        if full.endswith(".bias") and weight is not None:
            return weight[1:] or weight
        if name.startswith("rope_f"):
            return (int(self.sizes["rope.dimension_count"]) // 2,)
        if name.startswith("nextn."):
            return self._guess_predicting(name)
        translated = [self._widths.get(dim) for dim in self.header.tensors[full].dims]
        if None not in translated:
            return tuple(dim for dim in translated if dim is not None)
        elsewhere = _elsewhere(self._embedding).get(name)
        if elsewhere is None:
            raise MirrorError(f"it has a tensor {name}, which the small models of its architecture have not")
        return elsewhere

    def _guess_predicting(self, name: str) -> Shape:
        width = self._embedding
        if name == "nextn.eh_proj.weight":
            return (2 * width, width)
        if name in ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"):
            return (width, self.spec.get("vocabulary", 128))
        return (width,)

    @functools.cached_property
    def _widths(self) -> Mapping[int, int]:
        """What the file's widths are in the small model, where that is beyond doubt."""
        found: dict[int, set[int]] = {1: {1}}
        for name, shape in self.known.items():
            dims = self.header.tensors[name].dims
            if len(dims) == len(shape):
                for large, small in zip(dims, shape, strict=True):
                    found.setdefault(large, set()).add(small)
        return {large: small.pop() for large, small in found.items() if len(small) == 1}

    def _own(self) -> Iterable[tuple[str, Metadata]]:
        prefix = f"{self.architecture}."
        for key, entry in self.header.metadata.items():
            if key.startswith(prefix) and not key.startswith(f"{prefix}classifier."):
                yield key.removeprefix(prefix), entry

    def metadata(self) -> dict[str, Value]:
        """The file's keys, and sizes that it leaves to defaults."""
        found = {name: self._value(name, entry) for name, entry in self._own()}
        for name in sorted(_SIZES - set(found)):
            if not name.startswith(_ABSENT_STAYS_ABSENT) and self._usual(name):
                found[name] = (self._usual(name), GGUFValueType.UINT32)
        return found

    def rough_metadata(self) -> dict[str, Value]:
        """The keys of the architecture's small model, and the file's where they decide on slicing."""
        blocks = self.blocks - self._predicting
        found: dict[str, Value] = {}
        for name, value in self.sizes.items():
            if isinstance(value, dict):
                found[name] = (value["value"], GGUFValueType[value["type"]])
            elif name not in DECIDING or name in _SIZES:
                kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
                sample = value[0] if isinstance(value, list) else value
                kind = tiny_data()["types"].get(name, kinds[type(sample)])
                if isinstance(value, list) and not name.startswith(NOT_PER_LAYER):
                    value = list(itertools.islice(itertools.cycle(value), blocks))
                found[name] = (value, GGUFValueType[kind])
        per_layer = {
            name: self._value(name, entry)
            for name, entry in self._own()
            if name in DECIDING or (isinstance(entry.value, LazyArray) and len(entry.value) >= self.blocks)
        }
        found |= per_layer | {"block_count": (blocks, GGUFValueType.UINT32)}
        found["nextn_predict_layers"] = (0, GGUFValueType.UINT32)
        found["vocab_size"] = (self.spec.get("vocabulary", 128), GGUFValueType.UINT32)
        return found

    def _value(self, name: str, entry: Metadata) -> Value:
        """What a key of the file is in the small model."""
        value = entry.value
        if isinstance(value, LazyArray):
            if len(value) > _MOST_ENTRIES:
                raise MirrorError(f"{name} has {len(value)} entries")
            kind = GGUFValueType(value.element_type)
            if name.startswith("ple.") and name != "ple.layers":
                usual = self.sizes.get(name, list(value))
                return (usual["value"] if isinstance(usual, dict) else usual), kind
            if name in _SIZES:
                return [self._usual(name) if number else 0 for number in value], kind
            return list(value), kind
        kind = GGUFValueType(entry.type)
        if name == "vocab_size":
            return self.spec.get("vocabulary", 128), kind
        if name in _SIZES or name.startswith("ple."):
            return (self._usual(name) if value else value), kind
        return value, kind

    def _usual(self, name: str) -> Any:
        return _size(self.spec, name) or _UNKNOWN.get(name, 0)


def _size(spec: Mapping[str, Any], name: str) -> Any:
    """A size of a small model; of one for each layer, the largest."""
    value = spec["metadata"].get(name, tiny_data()["metadata"].get(name, 0))
    return max(value) if isinstance(value, list) else value


@functools.cache
def _part(index: int) -> Part:
    return dict(tiny_part(index, ""))


def _likeness(names: set[str], part: Part) -> float:
    return len(names & set(part)) - 0.5 * len(set(part) - names)


@functools.cache
def _elsewhere(embedding: int) -> Mapping[str, Shape]:
    """Shapes of tensors in layers of all small models of a width."""
    found: dict[str, Shape] = {}
    for spec in tiny_data()["families"].values():
        if _size(spec, "embedding_length") == embedding:
            parts: Sequence[int] = (*spec["mixers"], *spec["ffns"])
            for part in map(_part, parts):
                found = {**part, **found}
    return found

"""What about a model decides how it is sliced: two that are the same in this are cut by the same rules.

Widths, depths and most numbers play no part: a record of a small model speaks for a large one of its shape.
What a metadata key is *for* is not known here. A key, an array with an entry per layer or a tensor outside
the layers that none of the small models of the architecture has makes a shape of its own.
"""

from __future__ import annotations

import functools
import itertools
import re

from skippy.models.families import FAMILIES
from skippy.models.gguf import GGUFHeader, LazyArray, Metadata
from skippy.models.info import layer_count, split_layer_name
from skippy.models.layers import pins_count
from skippy.models.metadata import NOT_PER_LAYER
from skippy.models.tiny import tiny_architecture, tiny_data, tiny_models, tiny_part

_DECIDING_NAMES = (
    "attention.indexer.types attention.kv_lora_rank attention.q_lora_rank attention.recurrent_layers "
    "attention.shared_kv_layers attention.sliding_window attention.sliding_window_pattern "
    "attn_res.block_size embedding_scale expert_count expert_gating_func full_attention_interval "
    "hash_layer_count hyper_connection.count interleave_moe_layer_step leading_dense_block_count "
    "logit_scale moe_every_n_layers n_deepstack_layers nextn_predict_layers num_loops ple.layers "
    "rescale_every_n_layers residual_scale rope.dimension_sections"
)
DECIDING = frozenset(_DECIDING_NAMES.split())
"""Keys under the architecture's prefix by whose presence the rules of slicing go."""

_HARMLESS_NAMES = (
    "attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.logit_softcapping "
    "attention.scale block_count context_length expert_weights_norm expert_weights_scale hidden_act "
    "hidden_activation pooling_type rope.freq_base rope.scale_linear rope.scaling.apply_yarn_scaling "
    "rope.scaling.attn_factor rope.scaling.factor rope.scaling.finetuned "
    "rope.scaling.original_context_length rope.scaling.type tensor_data_layout vocab_size"
)
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Keys that small models need not have: the same numbers for all layers."""

_DEFAULTED = {
    "deepseek2": {"attention.q_lora_rank"},
    "grok": {"embedding_scale"},
    "minicpm": {"embedding_scale", "logit_scale", "residual_scale"},
}
"""Where a key that is missing is another thing than 0."""

_ALWAYS = frozenset({"token_embd.weight", "output_norm.weight"})
_HEADS = re.compile(r"(output|position_embd|token_embd_norm|token_types|per_layer_)\b|per_layer_")
"""Tensors outside the layers of which slices do not all have a copy."""
_MOST_ENTRIES = 1 << 16


def shape_of(header: GGUFHeader) -> tuple[str, ...]:
    """Facts about a whole model, in order: the architecture, then the rest as sentences.

    Raises:
        GGUFError: the file is damaged.
    """
    architecture = header.text("general.architecture")
    family, count = FAMILIES.get(architecture), layer_count(header)
    facts: set[str] = set()
    if family is not None and pins_count(family, count):
        which = f"{count} layers" if count in family.pinned else "the number of layers"
        facts.add(f"{which}: not to be changed")
    prefix = f"{architecture}."
    for key, entry in header.metadata.items():
        if key.startswith(prefix):
            fact = _fact(architecture, key.removeprefix(prefix), entry, count)
            facts |= {fact} if fact else set()
    for name in header.tensors:
        if split_layer_name(name) is None and name not in _ALWAYS:
            if _HEADS.match(name):
                facts.add(f"tensor {name}")
            elif name not in _known_tensors(architecture):
                facts.add(f"tensor {name}, which is not known")
    return (architecture, *sorted(facts))


def _fact(architecture: str, name: str, entry: Metadata, count: int) -> str | None:
    value, known = entry.value, name in _known_keys(architecture)
    if isinstance(value, LazyArray):
        if len(value) > _MOST_ENTRIES:
            return f"{name}: a long list"
        if len(value) < count or name.startswith(NOT_PER_LAYER):
            return f"{name}: a list" if any(value) and (name in DECIDING or not known) else None
        entries = list(itertools.islice(value, count))
        if not any(entries):
            # A pattern that says no is another thing than none, which stands for a rule.
            return f"{name}: nowhere" if name in DECIDING else None
        return f"{name}: each layer, " + ("everywhere" if all(entries) else "some without")
    if name in DECIDING:
        if value:
            return f"{name}: set"
        family = FAMILIES.get(architecture)
        windowed = name == "attention.sliding_window" and family is not None and family.window_default
        return f"{name}: 0" if windowed or name in _DEFAULTED.get(architecture, ()) else None
    return None if known else f"{name}: {'set' if value else '0'}, which is not known"


@functools.cache
def _known_keys(architecture: str) -> frozenset[str]:
    data = tiny_data()
    own = [data["families"][name]["metadata"] for name in _specs(architecture)]
    return frozenset().union(data["metadata"], *own, _HARMLESS, DECIDING)


@functools.cache
def _known_tensors(architecture: str) -> frozenset[str]:
    outer = [tiny_data()["families"][name]["other"] for name in _specs(architecture)]
    return frozenset(name for part in outer for name, _ in tiny_part(part, "")) | {"rope_freqs.weight"}


def _specs(architecture: str) -> list[str]:
    return [name for name in tiny_models() if tiny_architecture(name) == architecture]

"""Which layers a slice consists of: its own, and spare ones that make the rest of it behave as in the whole.

A spare layer has the shapes and the metadata of a layer of the model, and weights that are all zero: it adds
nothing to the residual stream. Spare layers are needed

* behind the last real layer of every slice but the last: the boundary is read in front of them, they are
  never computed, and thanks to them no row needs an output flag (llama.cpp drops other rows in its last
  layer);
* of each kind that the whole model has and the slice lacks: llama.cpp fills the inputs of every kind of
  memory for every batch, and ends the process where a graph does not use one;
* in front, where what a layer does depends on its index, or on the number of layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import attrs

from skippy.models.errors import CutError, GGUFError, show
from skippy.models.families import BEHIND, Family, Indexer, Lead
from skippy.models.gguf import GGUFHeader, LazyArray, Scalar, ValueType

LEADING_COUNTS = ("leading_dense_block_count", "hash_layer_count")
"""Numbers of layers at the beginning that are unlike the others."""

MOST_LAYERS = 512
"""What llama.cpp takes."""

MOST_FACTS = 32
"""By which layers of a model differ; real ones have up to six. Choosing spare layers takes time for each."""

Kinds = frozenset[tuple[str, Scalar]]


@attrs.frozen(slots=True)
class Picks:
    """The layers of a slice, as indices in the whole model, in order.

    Attributes:
        front: spare layers before the real ones.
        real: the slice's own.
        back: spare layers behind them, never computed.
    """

    front: tuple[int, ...]
    real: tuple[int, ...]
    back: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return self.front + self.real + self.back

    @property
    def computed(self) -> tuple[int, ...]:
        return self.front + self.real


def pick_layers(header: GGUFHeader, family: Family, start: int, end: int, count: int) -> Picks:
    """The layers of the slice ``[start, end)`` of ``count``.

    Raises:
        CutError: no choice of spare layers would make it right.
        GGUFError: the file's metadata is damaged.
    """
    if count > MOST_LAYERS:
        raise CutError(family.architecture, f"it has {count} layers, llama.cpp takes at most {MOST_LAYERS}")
    if pins_count(family, count) or (family.lead is Lead.ALL and start > 0):
        front, back = _pinned(family, start, end, count)
    else:
        front, back = _free(header, family, start, end, count)
    picks = Picks(front, tuple(range(start, end)), back)
    _check_leading(header, picks)
    return picks


def pins_count(family: Family, count: int) -> bool:
    """Whether every slice of a model of so many layers must have as many."""
    if family.pinned_from:
        return count >= family.pinned_from
    # A model with the number that others' slices must not have computes differently itself.
    return (
        count == family.not_layers or count in family.pinned or -1 in family.pinned or family.lead is Lead.ALL
    )


def phase_of(header: GGUFHeader, family: Family) -> int:
    """What a layer does depends on its index modulo this number."""
    phase = family.phase
    if family.phase_key:
        step = header.count(f"{family.architecture}.{family.phase_key}", 1) or 1
        if step > 64:
            raise GGUFError(header.path, f"damaged: {family.phase_key} is {step}")
        phase = math.lcm(phase, step)
    return phase


def _pinned(family: Family, start: int, end: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As many layers as the model; at their true indices where that matters, or in the last slice."""
    if end == count or family.lead is Lead.ALL:
        # Behind the last layer of a slice that is not the last one needs a spare, so end < count here.
        return tuple(range(start)), tuple(range(end, count))
    return (), (*range(end, count), *[count - 1] * start)


def _free(
    header: GGUFHeader, family: Family, start: int, end: int, count: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    last, phase = end == count, phase_of(header, family)
    kinds = kinds_of(header, family, count)
    front = list(range(start - start % phase, start))
    if family.lead is Lead.ONE and start > 0 and not front:
        front = [start]
    back = [] if last else [_behind(end, end, count, phase)]
    if phase > 1:
        return _in_phase(family, kinds, front, start, end, phase)
    missing = _missing(kinds, (*front, *range(start, end), *back))
    dense = max(header.count(f"{family.architecture}.{key}", 0) for key in LEADING_COUNTS)
    while missing:
        best = max(range(count), key=lambda i: (len(kinds[i] & missing), i >= dense, -abs(i - start)))
        missing -= kinds[best]
        if not last and (best >= dense or end <= dense):
            if back and set().union(*(kinds[i] for i in back)) <= kinds[best]:
                back.clear()  # one spare layer behind is enough
            back.append(best)
        else:
            front.append(best)
    if family.empty_layers and start > 0 and not front and _lacks_attention(header, family, start):
        front.append(_with_attention(header, family, count))
    spare = len(front) + end - start + len(back)
    if spare in family.pinned or spare == family.not_layers or 0 < family.pinned_from <= spare:
        (front if last else back).append(end - 1)
    return tuple(sorted(front)), tuple(sorted(back))


def _in_phase(
    family: Family, kinds: Sequence[Kinds], front: list[int], start: int, end: int, phase: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Spare layers behind in the order of the model; where these are not enough, whole periods in front."""
    count = len(kinds)
    back = [] if end == count else [_behind(end, end, count, phase)]
    while True:
        chosen = (*front, *range(start, end), *back)
        missing = _missing(kinds, chosen)
        if not missing and len(chosen) != family.not_layers:
            return tuple(front), tuple(back)
        if end < count and (not missing or end + len(back) < count + phase):
            back.append(_behind(end + len(back), end, count, phase))
        else:  # behind, layers begin to repeat: what is missing is in front, in a period not yet taken
            first = front[0] if front else start
            front = [*range(first - phase, first), *front]


def _missing(kinds: Sequence[Kinds], chosen: Iterable[int]) -> set[tuple[str, Scalar]]:
    """What the model has and these layers have not."""
    return set().union(*kinds) - set().union(*(kinds[i] for i in chosen))


def _behind(index: int, end: int, count: int, phase: int) -> int:
    """The layer to take for a spare one that stands where ``index`` would."""
    if phase == 1:
        return end - 1
    return index if index < count else index - -(-(index - count + 1) // phase) * phase


def _check_leading(header: GGUFHeader, picks: Picks) -> None:
    """The layers that a leading count means must be the first of the slice."""
    architecture = header.text("general.architecture")
    for key in LEADING_COUNTS:
        count = header.count(f"{architecture}.{key}", 0)
        leading = [index < count for index in picks.all]
        if leading != sorted(leading, reverse=True) and architecture not in ("lfm2",):
            raise CutError(architecture, f"no slice of these layers keeps the first {count} ({key}) in front")


def kinds_of(header: GGUFHeader, family: Family, count: int) -> list[Kinds]:
    """By what each layer's memory and inputs differ from those of others."""
    found: list[set[tuple[str, Scalar]]] = [set() for _ in range(count)]
    architecture = family.architecture

    def mark(name: str, values: Sequence[Scalar] | None) -> None:
        for kind, value in zip(found, values or (), strict=False):
            kind.add((name, value))

    windows = window_pattern(header, family, count)
    recurrent = recurrent_layers(header, family, count)
    mark("window", windows)
    mark("recurrent", recurrent)
    mark("ratio", per_layer(header, f"{architecture}.attention.compress_ratios", count))
    if "dense" in family.kinds:
        dense = header.count(f"{architecture}.leading_dense_block_count", 0)
        mark("dense", [index < dense for index in range(count)])
    if "nope" in family.kinds:
        mark("nope", [(index + 1) % family.phase == 0 for index in range(count)])
    if family.mixed_only:
        lengths = per_layer(header, f"{architecture}.feed_forward_length", count) or [0] * count
        for kind, length in zip(found, lengths, strict=True):
            if length:
                kind.clear()
    if family.empty_layers:
        for index, kind in enumerate(found):
            if not _lacks_cache(header, family, index):
                kind.add(("cache", True))
    facts = len(set().union(*found))
    if facts > MOST_FACTS:
        raise GGUFError(header.path, f"damaged: its layers differ in {facts} ways, at most {MOST_FACTS} do")
    return [frozenset(kind) for kind in found]


def per_layer(header: GGUFHeader, key: str, count: int) -> list[Scalar] | None:
    """The first ``count`` entries of an array of integers; None where there is none, or it is shorter.

    Raises:
        GGUFError: an array of something else.
    """
    value = header.value(key)
    if not isinstance(value, LazyArray):
        return None
    if value.element_type in (ValueType.STRING, ValueType.FLOAT32, ValueType.FLOAT64):
        kind = value.element_type.name
        raise GGUFError(header.path, f"damaged: {show(key)} is an array of {kind}, not of integers")
    if len(value) < count:
        return None
    return list(itertools.islice(value, count))


def window_pattern(header: GGUFHeader, family: Family, count: int) -> list[Scalar] | None:
    """Which layers look at a window only; None where the family or the file has no windows."""
    prefix = f"{family.architecture}.attention.sliding_window"
    window = header.value(prefix)
    if not window and not (window is None and family.window_default):
        return None
    pattern = header.value(f"{prefix}_pattern")
    if isinstance(pattern, LazyArray):
        return per_layer(header, f"{prefix}_pattern", count)
    if family.pinned == (64,) and count != 64:
        return None  # only that model of the family has windows
    period = pattern if isinstance(pattern, int) and pattern else family.window_period
    if not period:
        return None
    if family.full_first:
        return [int(index % period != 0) for index in range(count)]
    return [int(index % period < period - 1) for index in range(count)]


def recurrent_layers(header: GGUFHeader, family: Family, count: int) -> list[Scalar] | None:
    """Which layers keep a recurrent state; None where all or none do."""
    prefix = f"{family.architecture}."
    found = per_layer(header, f"{prefix}attention.recurrent_layers", count)
    if found is not None:
        return found
    if family.interval:
        interval = header.count(f"{prefix}full_attention_interval", family.interval) or 1
        return [int((index + 1) % interval != 0) for index in range(count)]
    heads = per_layer(header, f"{prefix}attention.head_count_kv", count)
    if heads is None or family.empty_layers:
        return None
    return [int(not number) for number in heads]


def check_cut(header: GGUFHeader, family: Family, cut: int) -> None:
    """Raises CutError where a slice can neither end nor begin at layer ``cut``, ``0 < cut < layers``."""
    architecture = family.architecture
    if family.indexer is Indexer.SHARED:
        value = header.value(f"{architecture}.attention.indexer.types")
        if value is None and header.count(f"{architecture}.context_length", 0) >= 1 << 20:
            raise CutError(architecture, "it needs attention.indexer.types, which the file leaves out")
        if isinstance(value, LazyArray) and not (len(value) > cut and value[cut]):
            raise CutError(
                architecture,
                f"layer {cut} uses the positions that an earlier layer has found, which do not cross a cut; "
                "it can be cut in front of layers with an indexer of their own",
            )
    if family.empty_layers and _is_empty(header, f"{architecture}.feed_forward_length", cut - 1):
        raise CutError(architecture, f"layer {cut - 1} has no feed-forward part, so no output to cut behind")


def _is_empty(header: GGUFHeader, key: str, index: int) -> bool:
    value = header.value(key)
    return isinstance(value, LazyArray) and index < len(value) and not value[index]


def _lacks_attention(header: GGUFHeader, family: Family, index: int) -> bool:
    return _is_empty(header, f"{family.architecture}.attention.head_count", index)


def _lacks_cache(header: GGUFHeader, family: Family, index: int) -> bool:
    return _is_empty(header, f"{family.architecture}.attention.head_count_kv", index)


def _with_attention(header: GGUFHeader, family: Family, count: int) -> int:
    for index in range(count):
        if not _lacks_cache(header, family, index):
            return index
    raise CutError(family.architecture, "none of its layers has attention")


def entry_node(family: Family, picks: Picks, start: int) -> str | None:
    """The node that a later slice overwrites with the residual stream; None where embeddings do."""
    if start == 0 or family.entry is None:
        return None
    if picks.front:
        return family.boundary.format(len(picks.front) - 1)
    if family.entry == BEHIND:
        raise CutError(family.architecture, "a later slice needs a spare layer in front")
    return family.entry

"""What a loaded model and its context are, as :class:`~skippy.engine.EngineInfo` tells it."""

from __future__ import annotations

from typing import Any

from skippy.engine.base import EngineInfo, ModelLoadError, Pooling
from skippy.engine.options import EngineOptions
from skippy.engine.tap import Tap
from skippy.models import SliceInfo

from .memory import MemoryKind
from .native import api, metadata
from .order import RowOrder
from .vocabulary import LlamaVocabulary


def has_vocabulary(model: int, slice_info: SliceInfo) -> bool:
    if not (slice_info.is_first or slice_info.is_last):
        return False
    if not LlamaVocabulary.exists(model):
        raise ModelLoadError(f"{slice_info.path} has no vocabulary, which a first or last stage needs")
    return True


def row_order(kind: MemoryKind) -> RowOrder:
    if kind.recurrent or kind.forgetful:
        return RowOrder.UNKNOWN
    return RowOrder.BATCH if kind.unified else RowOrder.EQUAL


def position_sections(model: int) -> int:
    """Positions per activation row: 4 with multi-section rotary embedding (M-RoPE), else 1."""
    return 4 if api.llama_model_rope_type(model) in (api.LLAMA_ROPE_TYPE_MROPE, 40) else 1


def pooling(model: int, slice_info: SliceInfo) -> Pooling | None:
    """What the model's metadata says; None for a part of a model, and for rerankers."""
    if not (slice_info.is_first and slice_info.is_last):
        return None
    poolings: dict[str | None, Pooling] = {None: "last", "0": "last", "1": "mean", "2": "first", "3": "last"}
    return poolings.get(metadata(model, f"{slice_info.architecture}.pooling_type"))


def describe(
    model: int, context: int, slice_info: SliceInfo, options: EngineOptions, tap: Tap | None, kind: MemoryKind
) -> EngineInfo:
    ends = slice_info.is_first or slice_info.is_last
    vocabulary: Any = api.llama_model_get_vocab(model)
    return EngineInfo(
        layer_start=slice_info.layer_start,
        layer_end=slice_info.layer_end,
        layer_count=slice_info.layer_count,
        input_width=slice_info.input_width,
        output_width=slice_info.output_width,
        takes_tokens=slice_info.takes_tokens,
        hidden_size=slice_info.hidden_size,
        vocab_size=int(api.llama_vocab_n_tokens(vocabulary)) if ends or slice_info.takes_tokens else 0,
        context_length=options.context_length,
        max_batch=min(options.n_batch, int(api.llama_n_batch(context))),
        max_sequences=options.max_sequences,
        can_trim=kind.can_trim,
        can_trim_state=kind.can_trim and not kind.window,
        can_mix=row_order(kind) is not RowOrder.UNKNOWN,
        pooling=pooling(model, slice_info),
        tap=None if tap is None else tap.kind,
        weights_bytes=int(api.llama_model_size(model)),
    )

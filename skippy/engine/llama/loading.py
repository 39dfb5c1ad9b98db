"""From options to llama.cpp's parameter structs, and loading a model and a context with them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Final

from skippy.engine.base import ModelLoadError
from skippy.engine.options import EngineOptions, usable_cores
from skippy.engine.tap import Tap, abort_function
from skippy.models import SliceInfo

from .devices import device_array
from .native import api, metadata, reported_errors
from .precheck import check_file

LoadProgress = Callable[[float], None]
"""Told how much of the weights is loaded, from 0.0 to 1.0."""

_CELL_PADDING: Final = 256  # llama.cpp pads each sequence's cells to this
_SPLIT_MODES: Final = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_FLASH_ATTENTION: Final = {"auto": -1, "disabled": 0, "enabled": 1}
_LOAD_NONE, _LOAD_MMAP, _LOAD_MLOCK, _LOAD_MMAP_MLOCK, _LOAD_DIRECT = range(5)
_CACHE_TYPES: Final = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}  # enum ggml_type


def load_model(info: SliceInfo, options: EngineOptions, progress: LoadProgress | None = None) -> int:
    """Load the weights. Returns llama.cpp's model pointer.

    ``progress`` is called on this thread with the part that is loaded; an exception in it ends the loading
    and is raised here.

    Raises:
        ModelLoadError: with llama.cpp's own words where it gave any.
    """
    if not info.path.is_file():
        raise ModelLoadError(f"no model file at {info.path}")
    check_file(info)
    params = api.llama_model_default_params()
    devices = device_array(options)
    if devices is not None:
        params.devices = ctypes.addressof(devices)
    params.n_gpu_layers = options.n_gpu_layers
    params.main_gpu = options.main_gpu
    if options.split_mode != "auto":
        params.split_mode = _SPLIT_MODES[options.split_mode]
    params.load_mode = _load_mode(options)
    params.check_tensors = options.check_tensors
    params.use_extra_bufts = options.repack
    params.no_host = options.no_host_buffer
    failures: list[BaseException] = []
    if progress is not None:
        # The struct keeps no reference to the callback; this name does until loading has ended.
        callback = api.llama_progress_callback(_guarded(progress, failures))
        params.progress_callback = callback
    with reported_errors() as errors:
        model = api.llama_model_load_from_file(os.fsencode(info.path), params)
    if failures:
        if model:
            api.llama_model_free(model)
        raise failures[0]
    if not model:
        raise ModelLoadError(f"{info.path} could not be loaded: {'; '.join(errors) or 'no reason given'}")
    try:
        _check_model(model, info)
    except ModelLoadError:
        api.llama_model_free(model)
        raise
    return int(model)


def _guarded(progress: LoadProgress, failures: list[BaseException]) -> Callable[[float, int | None], bool]:
    def report(part: float, _user_data: int | None) -> bool:
        try:
            progress(part)
        except BaseException as error:  # must not travel through native frames
            failures.append(error)
        return not failures

    return report


def _load_mode(options: EngineOptions) -> int:
    if options.direct_io:
        return _LOAD_DIRECT
    if options.mmap is False:
        return _LOAD_MLOCK if options.mlock else _LOAD_NONE
    return _LOAD_MMAP_MLOCK if options.mlock else _LOAD_MMAP


def _check_model(model: int, info: SliceInfo) -> None:
    """Refuse what would not run as a stage, or would end the process when run."""
    # A first slice may have wider rows of images, which it does not get.
    row_size = api.llama_model_n_embd_inp if takes_embeddings(info) else api.llama_model_n_embd
    layers, width = api.llama_model_n_layer(model), row_size(model)
    if layers != info.file_layers:
        raise ModelLoadError(f"{info.path} has {layers} layers, expected {info.file_layers}")
    if width != info.hidden_size:
        raise ModelLoadError(f"{info.path} takes rows of {width} values, expected {info.hidden_size}")
    if not _generates(model, info):
        raise ModelLoadError(f"{info.path} ({info.architecture}) does not generate text token by token")


def takes_embeddings(info: SliceInfo) -> bool:
    """Whether the boundary is fed as embeddings; else tokens are, with the boundary put in behind them."""
    return not info.is_first and not info.inputs


def _generates(model: int, info: SliceInfo) -> bool:
    return not (
        not api.llama_model_has_decoder(model)
        or api.llama_model_has_encoder(model)
        or api.llama_model_is_diffusion(model)
        or metadata(model, f"{info.architecture}.attention.causal") == "false"
    )


def _padded(cells: int) -> int:
    return -(-cells // _CELL_PADDING) * _CELL_PADDING


def create_context(model: int, info: SliceInfo, options: EngineOptions, tap: Tap | None) -> int:
    """A context with its KV cache. Returns llama.cpp's context pointer.

    Each sequence gets ``context_length`` cells, or all together ``cells``, rounded up to a multiple of 256 as
    llama.cpp wants; the engine holds callers to the length they asked for.

    Raises:
        ModelLoadError: with llama.cpp's own words where it gave any.
    """
    params: Any = api.llama_context_default_params()
    if options.cells is None:
        params.n_ctx = _padded(options.context_length) * options.max_sequences
    else:
        params.n_ctx = _padded(options.cells)
    params.n_batch = params.n_outputs_max = max(options.n_batch, options.max_sequences)
    if not info.is_last and info.spare_layers:
        # No row of this stage is ever an output; llama.cpp wants room for one per sequence all the same.
        params.n_outputs_max = options.max_sequences
    params.n_ubatch = options.n_ubatch
    if _keeps_state(model) and not options.kv_unified:
        # For some of these llama.cpp plans a graph of n_ubatch rows of n_seq_max sequences, equally many of
        # each, and ends the process where that does not come out even.
        params.n_ubatch = max(1, options.n_ubatch // options.max_sequences) * options.max_sequences
    params.n_seq_max = options.max_sequences
    params.n_threads = options.n_threads or usable_cores()
    params.n_threads_batch = options.n_threads_batch or options.n_threads or usable_cores()
    params.type_k = _CACHE_TYPES[options.cache_type_k]
    params.type_v = _CACHE_TYPES[options.cache_type_v]
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attn]
    params.offload_kqv = options.kv_offload
    params.op_offload = options.op_offload
    params.kv_unified = options.kv_unified
    params.swa_full = options.swa_full
    params.no_perf = True
    params.embeddings = False
    if metadata(model, f"{info.architecture}.pooling_type") is not None:
        # Rows are pooled by who asks for embeddings. Models that say nothing do without, and warn if told.
        params.pooling_type = api.LLAMA_POOLING_TYPE_NONE
    if tap is not None:
        params.cb_eval = ctypes.cast(tap.callback, type(params.cb_eval))
        params.cb_eval_user_data = tap.user_data
    with reported_errors() as errors:
        context = api.llama_init_from_model(model, params)
    if not context:
        reason = "; ".join(errors) or "no reason given"
        raise ModelLoadError(f"{info.path}: no context with these settings: {reason}")
    if not api.llama_get_memory(context):
        api.llama_free(context)
        raise ModelLoadError(f"{info.path} ({info.architecture}) has no KV cache to generate with")
    if api.llama_n_ctx_seq(context) < options.context_length:
        cells = api.llama_n_ctx_seq(context)
        api.llama_free(context)
        raise ModelLoadError(
            f"llama.cpp gave {cells} cells per sequence, {options.context_length} are needed"
        )
    return int(context)


def _keeps_state(model: int) -> bool:
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def set_abort_flag(context: int, flag: int) -> bool:
    """Let llama.cpp end a decode when the int32 at ``flag`` is not 0.

    False without the compiled library: in Python the callback would run once per graph node.
    """
    function = abort_function()
    if function is None:
        return False
    api.llama_set_abort_callback(context, ctypes.cast(function, api.ggml_abort_callback), flag)
    return True

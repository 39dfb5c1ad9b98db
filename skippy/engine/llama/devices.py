"""Which devices a model may use, by the names that ggml reports."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import attrs

from skippy.engine.base import ModelLoadError
from skippy.engine.options import EngineOptions

from .native import api, ggml_functions

_CPU: Final = 0
_GPUS: Final = (1, 2)  # enum ggml_backend_dev_type: GPU, IGPU
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "ggml_backend_dev_count": (ctypes.c_size_t,),
    "ggml_backend_dev_get": (ctypes.c_void_p, ctypes.c_size_t),
    "ggml_backend_dev_name": (ctypes.c_char_p, ctypes.c_void_p),
    "ggml_backend_dev_type": (ctypes.c_int, ctypes.c_void_p),
}


@attrs.frozen(slots=True)
class Device:
    """A device of ggml's registry: its handle, name and ``ggml_backend_dev_type``."""

    handle: int
    name: str
    kind: int


def reported_devices() -> list[Device]:
    """What this build of llama.cpp finds on this machine, after :func:`~.native.initialise`."""
    addresses = ggml_functions(tuple(_SIGNATURES))
    count, get, name, kind = (
        ctypes.CFUNCTYPE(*signature)(addresses[function]) for function, signature in _SIGNATURES.items()
    )
    handles = [get(index) for index in range(count())]
    return [Device(handle, name(handle).decode(errors="replace"), kind(handle)) for handle in handles]


def chosen_devices(options: EngineOptions, reported: Sequence[Device], gpu_offload: bool) -> list[int] | None:
    """Handles of the devices to offload to, for ``llama_model_params.devices``; None for llama.cpp's choice.

    Args:
        reported: as :func:`reported_devices`.
        gpu_offload: whether this build can offload at all.

    Raises:
        ModelLoadError: naming the option that asks for a device that is not there.
    """
    gpus = [device for device in reported if device.kind in _GPUS] if gpu_offload else []
    if options.device is not None:
        usable = [device for device in reported if device.kind == _CPU] + gpus
        gpus = [device for device in gpus if device.name == options.device]
        if options.device not in [device.name for device in usable]:
            names = ", ".join(device.name for device in usable)
            raise ModelLoadError(f"device: there is no {options.device!r} here; ggml reports {names}")
    where = "this machine" if options.device is None else f"device {options.device}"
    if not gpus:
        for name, asked in (
            ("n_gpu_layers", options.n_gpu_layers != 0),
            ("split_mode", options.split_mode not in ("auto", "none")),
        ):
            if asked:
                raise ModelLoadError(
                    f"{name}: is {getattr(options, name)}, but llama.cpp finds no GPU on {where}"
                )
    if options.main_gpu >= max(1, len(gpus)):
        raise ModelLoadError(f"main_gpu: is {options.main_gpu}, but {where} has {len(gpus)} GPUs")
    return None if options.device is None else [device.handle for device in gpus]


def device_array(options: EngineOptions) -> Any:
    """The NULL-terminated array for ``llama_model_params.devices``, or None.

    Raises:
        ModelLoadError: as :func:`chosen_devices`.
    """
    handles = chosen_devices(options, reported_devices(), bool(api.llama_supports_gpu_offload()))
    return None if handles is None else (ctypes.c_void_p * (len(handles) + 1))(*handles, None)

"""llama.cpp's quantiser: of files, for the types it chooses, and of rows, for the bytes.

Source: ``llama_model_quantize`` in llama.cpp's src/llama-quant.cpp, which hands rows to
``ggml_quantize_chunk`` and checks the result with ``ggml_validate_row_data``. Rows do not depend on others.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from skippy.engine.options import usable_cores
from skippy.models import ModelError
from skippy.models.tensor_types import tensor_bytes

from .native import api, ggml_functions, initialise, reported_errors, silenced

_FUNCTIONS: Final = ("ggml_quantize_chunk", "ggml_validate_row_data")
_CHUNK: Final = 1 << 18  # values that one thread quantises at once


class LlamaQuantiser:
    """See :class:`skippy.models.Quantiser`."""

    def __init__(self) -> None:
        initialise()
        chunk, validate = ggml_functions(_FUNCTIONS).values()
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        quantise = ctypes.CFUNCTYPE(
            ctypes.c_size_t, ctypes.c_int, pointer, pointer, size, size, size, pointer
        )
        check = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int, pointer, ctypes.c_size_t)
        self._quantise: Any = quantise(chunk)
        self._is_valid: Any = check(validate)

    @property
    def version(self) -> str:
        return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"

    def quantise_file(
        self, source: Path, target: Path, quantization: str, importance: Mapping[str, npt.NDArray[np.float32]]
    ) -> None:
        params = api.llama_model_quantize_default_params()
        params.ftype = _file_type(quantization)
        params.nthread = usable_cores()
        if importance:
            # Ends with an entry without a name. Arrays and names are held by their owner until the call ends.
            entries = (api.llama_model_imatrix_data * (len(importance) + 1))()
            for entry, (name, values) in zip(entries, importance.items(), strict=False):
                entry.name, entry.size = name.encode(), values.size
                entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            params.imatrix = entries
        with silenced(), reported_errors() as errors:
            failed = api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
        if failed:
            reason = " ".join("; ".join(errors).replace("=", "").split())
            raise ModelError(f"llama.cpp cannot quantise to {quantization}: {reason or 'it gives no reason'}")

    def quantise_rows(
        self, values: npt.NDArray[np.float32], kind: int, importance: npt.NDArray[np.float32] | None
    ) -> bytes:
        rows, width = values.shape
        values = np.ascontiguousarray(values, np.float32)
        row_bytes = tensor_bytes(kind, (width,))
        out = np.empty((rows, row_bytes), np.uint8)
        step = max(1, _CHUNK // width)

        def quantise(start: int) -> bool:
            count = min(step, rows - start)
            target = out[start:].ctypes.data
            self._quantise(
                kind,
                values[start:].ctypes.data,
                target,
                0,
                count,
                width,
                None if importance is None else importance.ctypes.data,
            )
            return bool(self._is_valid(kind, target, count * row_bytes))

        with ThreadPoolExecutor(usable_cores()) as pool:  # the calls let go of the interpreter
            if not all(pool.map(quantise, range(0, rows, step))):
                raise ModelError("a weight is not a finite number, or became none when it was quantised")
        return out.tobytes()


def _file_type(quantization: str) -> int:
    name = "ALL_F32" if quantization == "F32" else f"MOSTLY_{quantization}"
    return int(getattr(api, f"LLAMA_FTYPE_{name}"))

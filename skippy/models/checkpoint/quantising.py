"""What quantises, seen from here: llama.cpp, which this package does not import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import attrs

from skippy.config.quantization import PRESERVE

from .tensors import Floats


class Quantiser(Protocol):
    """llama.cpp's quantiser. Calls block; safe from any thread."""

    @property
    def version(self) -> str:
        """Of the library; another one may give other bytes."""
        ...

    def quantise_file(
        self, source: Path, target: Path, quantization: str, importance: Mapping[str, Floats]
    ) -> None:
        """Write the GGUF ``source`` quantised to ``target``.

        Args:
            quantization: a name of :data:`skippy.config.quantization.QUANTIZATIONS`, not ``preserve``.
            importance: by tensor; empty for none at all, which is not the same as one that lacks tensors.

        Raises:
            ModelError: llama.cpp refuses, in its own words.
        """
        ...

    def quantise_rows(self, values: Floats, kind: int, importance: Floats | None) -> bytes:
        """Rows of F32 values as rows of the ggml type ``kind``.

        Args:
            values: [rows, width], contiguous.
            importance: [width], or None.

        Raises:
            ModelError: the result is not a number everywhere.
        """
        ...


@attrs.frozen(slots=True)
class Recipe:
    """What a checkpoint is to become. Only ``preserve`` needs no quantiser.

    Attributes:
        quantization: a name of :data:`skippy.config.quantization.QUANTIZATIONS`.
        imatrix: file with the importance matrix.
        imatrix_sha256: what it must be.
        quantiser: what does it.
    """

    quantization: str = PRESERVE
    imatrix: Path | None = None
    imatrix_sha256: str | None = None
    quantiser: Quantiser | None = None

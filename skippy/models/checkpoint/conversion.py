"""A checkpoint on its way to a GGUF: what it is, its outline, and the data of any tensor."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from gguf import GGUFValueType

from skippy.config.quantization import PRESERVE, check_imatrix
from skippy.models.errors import CheckpointError
from skippy.models.gguf import TensorInfo
from skippy.models.slicer import file_sha256
from skippy.models.store import Progress

from .folder import Checkpoint, Reader
from .imatrix import ImportanceMatrix
from .outline import decide_types, write_outline
from .quantising import Recipe
from .settings import Config, Shape, read_settings, read_shape
from .tensors import F32, ConvertedTensor, Floats, as_floats, convert_tensors, raw_rows
from .vocabulary import Metadata, read_vocabulary

CONVERSION_VERSION: Final = 2
"""Raised whenever the same checkpoint and recipe would give another GGUF, or none."""
_HASH_PIECE: Final = 8 << 20


@attrs.frozen(slots=True, eq=False)
class Conversion:
    """A checkpoint and a recipe, both checked.

    Attributes:
        digest: of what the whole GGUF will be, as 64 hex digits; the same on every machine.
        tensors: of the whole GGUF, before quantisation, in file order.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    digest: str
    tensors: Mapping[str, ConvertedTensor]
    _config: Config
    _shape: Shape
    _importance: ImportanceMatrix | None

    @classmethod
    def prepare(cls, folder: str | os.PathLike[str], recipe: Recipe) -> Conversion:
        """Open a checkpoint and decide what its tensors become. Reads headers and samples, no whole tensors.

        Raises:
            CheckpointError, GGUFError: something about the checkpoint or the importance matrix is not right.
            ConfigError: the recipe contradicts itself.
        """
        check_imatrix(recipe.quantization, None if recipe.imatrix is None else str(recipe.imatrix))
        checkpoint = Checkpoint.open(folder)
        config = Config(checkpoint)
        shape = read_shape(config)
        tensors = convert_tensors(checkpoint, config, shape)
        importance, imatrix_sha256 = _open_imatrix(recipe)
        parts: list[Any] = [CONVERSION_VERSION, checkpoint.fingerprint(), recipe.quantization, imatrix_sha256]
        if recipe.quantization != PRESERVE:
            assert recipe.quantiser is not None, "only preserve needs none"
            parts.append(recipe.quantiser.version)
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return cls(checkpoint, recipe, digest, tensors, config, shape, importance)

    def write_outline(self, path: Path) -> None:
        """Write the GGUF without its data.

        Raises:
            ModelError: the tokenizer is not one that is converted, or llama.cpp refuses the quantisation.
            OSError: the file cannot be written.
        """
        architecture = self._shape.architecture
        settings = read_settings(self._config, self._shape)
        vocabulary = read_vocabulary(self.checkpoint, self._shape.vocabulary)
        if architecture.space_prefix is not None:
            vocabulary["tokenizer.ggml.add_space_prefix"] = (GGUFValueType.BOOL, architecture.space_prefix)
        types, file_type = decide_types(
            architecture.name,
            settings,
            self.tensors,
            self.recipe.quantization,
            self.recipe.quantiser,
            self._importance,
        )
        metadata: Metadata = settings | vocabulary
        try:
            write_outline(path, architecture.name, metadata, self.tensors, types, file_type)
        except UnicodeEncodeError as error:  # JSON can say what is no character: half of a surrogate pair
            raise CheckpointError(
                self.checkpoint.folder,
                f"its tokenizer's files are damaged: a text that is not Unicode: {error.reason}",
            ) from None

    def files(self, names: Iterable[str]) -> list[list[Any]]:
        """What the data of these tensors is read from, as the file system knows it; for remembering."""
        found: list[list[Any]] = []
        for name in names:
            for part in self.tensors[name].parts:
                file = part.file
                real = os.path.realpath(file.path)
                found.append([real, file.size, file.mtime_ns, file.inode, part.offset, part.nbytes])
        return found

    def content_sha256(self, names: Iterable[str], progress: Progress | None) -> str:
        """SHA-256, in hex, of the stored bytes of these tensors. Reads them."""
        digest = hashlib.sha256()
        parts = [part for name in names for part in self.tensors[name].parts]
        total, done = sum(part.nbytes for part in parts), 0
        with Reader() as reader:
            for part in parts:
                for start in range(0, part.nbytes, _HASH_PIECE):
                    data = reader.read(part, start, min(_HASH_PIECE, part.nbytes - start))
                    digest.update(data)
                    done += len(data)
                    if progress is not None:
                        progress("hash", done, total)
        return digest.hexdigest()

    def data(self, tensor: TensorInfo) -> Iterator[bytes]:
        """The bytes of a tensor of the outline, in pieces.

        Memory: a piece as stored, as F32 and as quantised.

        Raises:
            ModelError: a file changed or cannot be read, or values that are not finite were met.
        """
        source = self.tensors[tensor.name]
        wanted = source.dims[0] * max(1, len(source.parts))
        importance = None if self._importance is None else self._importance.values(tensor.name, wanted)
        with Reader() as reader:
            if source.values:
                yield np.asarray(source.values, "<f4").tobytes()
            for place, rows, part in raw_rows(source, reader):
                if part is None or source.raw_type(part) == tensor.type:
                    yield rows.tobytes()
                else:
                    floats = as_floats(rows, part.dtype)
                    if source.shift:
                        floats = floats + np.float32(source.shift)
                    yield self._encoded(floats, source, tensor.type, importance, place)

    def _encoded(
        self, floats: Floats, source: ConvertedTensor, kind: int, importance: Floats | None, place: int
    ) -> bytes:
        if kind == F32:
            return floats.tobytes()
        assert self.recipe.quantiser is not None, "preserve changes no type but to F32"
        width = source.dims[0]
        own = None if importance is None else importance[place * width : (place + 1) * width]
        return self.recipe.quantiser.quantise_rows(floats.reshape(-1, width), kind, own)


def _open_imatrix(recipe: Recipe) -> tuple[ImportanceMatrix | None, str | None]:
    if recipe.imatrix is None:
        return None, None
    sha256 = file_sha256(recipe.imatrix)
    if recipe.imatrix_sha256 is not None and recipe.imatrix_sha256.lower() != sha256:
        raise CheckpointError(
            recipe.imatrix, f"has the SHA-256 {sha256}, checkpoint_imatrix_sha256 is {recipe.imatrix_sha256}"
        )
    return ImportanceMatrix.open(recipe.imatrix), sha256

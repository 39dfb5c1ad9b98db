"""A checkpoint folder as Hugging Face's libraries write it: which files, and what is in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from skippy.models.errors import CheckpointError, show
from skippy.models.manifest import MANIFEST
from skippy.models.reading import Sources
from skippy.models.texts import read_bytes, read_object

from .safetensors import MAX_TENSORS, StoredTensor, read_header

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_CONFIG: Final = 1 << 20  # bytes; real ones have a few thousand
MAX_TOKENIZER: Final = 64 << 20  # bytes; the largest real ones have some 35 million
MAX_INDEX: Final = 16 << 20  # bytes; the largest real ones have some 10 million
TEXTS: Final[Mapping[str, int]] = {
    CONFIG: MAX_CONFIG,
    "tokenizer_config.json": MAX_CONFIG * 4,  # lists added tokens, and has the chat template
    "added_tokens.json": MAX_CONFIG,
    "chat_template.jinja": MAX_CONFIG,
    "chat_template.json": MAX_CONFIG,
    "tokenizer.json": MAX_TOKENIZER,
    "tokenizer.model": MAX_TOKENIZER,
    "merges.txt": MAX_TOKENIZER,
}
"""Every file beside the weights that conversion reads, with its greatest length."""
TEMPLATES: Final = "additional_chat_templates"
"""A folder with more templates, of which each may be as long as :data:`MAX_CONFIG` says."""
MAX_TEMPLATES: Final = 64
MAX_SHARDS: Final = 4096
_SAMPLES: Final = 16
_SAMPLE: Final = 4096  # bytes


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a checkpoint's folder, which may be damaged or incomplete, and no layer package."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and not (folder / MANIFEST).is_file()


@attrs.frozen(slots=True, eq=False)
class Checkpoint:
    """An opened checkpoint: texts checked for size, headers of all shards read, no tensor data.

    Attributes:
        folder: as given.
        config: of ``config.json``.
        tensors: by name, over all shards.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read what there is.

        Raises:
            CheckpointError: a file is missing, damaged or too large, or the index names what is not there.
        """
        folder = Path(folder)
        for file, limit in _texts(folder):
            if file.stat().st_size > limit:
                raise CheckpointError(file, f"has {file.stat().st_size} bytes, at most {limit} are read")
        config = read_object(folder / CONFIG, MAX_CONFIG, CheckpointError)
        if (folder / INDEX).is_file():
            tensors = _read_shards(folder)
        elif (folder / WEIGHTS).is_file():
            tensors = read_header(folder / WEIGHTS)
        else:
            raise CheckpointError(folder, f"has no weights; expected {WEIGHTS} or {INDEX} with its shards")
        return cls(folder, config, tensors)

    def fingerprint(self) -> str:
        """What the checkpoint is, as 64 hex digits: the same on every machine, however it is sharded.

        Over all texts, over name, type and shape of every tensor, and over 16 samples of 4 KiB of each, its
        ends among them: a stage must not have to read what belongs to others, but what was trained further
        or merged with an adapter differs in most places.
        """
        digest = hashlib.sha256(b"skippy checkpoint 1\0")
        for file, limit in _texts(self.folder):
            digest.update(f"{file.name}\0".encode())
            digest.update(hashlib.sha256(read_bytes(file, limit, CheckpointError)).digest())
        with Reader() as reader:
            for name, tensor in sorted(self.tensors.items()):
                digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
                for start, count in _samples(tensor.nbytes):
                    digest.update(reader.read(tensor, start, count))
        return digest.hexdigest()


def _texts(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files beside the weights that are there, each with its greatest length."""
    for name, limit in TEXTS.items():
        if (folder / name).is_file():
            yield folder / name, limit
    templates = sorted((folder / TEMPLATES).glob("*.jinja"))
    if len(templates) > MAX_TEMPLATES:
        raise CheckpointError(folder / TEMPLATES, f"has over {MAX_TEMPLATES} templates, which is the limit")
    for template in templates:
        if not template.is_file():
            raise CheckpointError(template, "is no regular file")
        yield template, MAX_CONFIG


def _samples(size: int) -> Iterator[tuple[int, int]]:
    if size <= _SAMPLES * _SAMPLE:
        yield 0, size
        return
    for index in range(_SAMPLES):
        yield index * (size - _SAMPLE) // (_SAMPLES - 1), _SAMPLE


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    names = read_object(index, MAX_INDEX, CheckpointError).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(index, "damaged: weight_map must give a file for each tensor")
    files = sorted(set(names.values()))
    if len(files) > MAX_SHARDS:
        raise CheckpointError(index, f"names {len(files)} files, the limit is {MAX_SHARDS}")
    for file in files:
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(
                index, f"names {show(file)}; expected a .safetensors file of the same folder"
            )
        if not (folder / file).is_file():
            raise CheckpointError(index, f"shard {show(file)} is missing")
    shards: dict[str, Mapping[str, StoredTensor]] = {}
    count = 0
    for file in files:
        shards[file] = read_header(folder / file)
        count += len(shards[file])
        if count > MAX_TENSORS:
            raise CheckpointError(index, f"names files with over {MAX_TENSORS} tensors, which is the limit")
    tensors: dict[str, StoredTensor] = {}
    for name, file in names.items():
        if name not in shards[file]:
            raise CheckpointError(
                index, f"says that {show(name)} is in {show(file)}, which has no such tensor"
            )
        tensors[name] = shards[file][name]
    return tensors


class Reader(Sources):
    """Reads ranges of tensors."""

    def read(self, tensor: StoredTensor, start: int, count: int) -> bytes:
        """``count`` bytes of a tensor from byte ``start`` on.

        Raises:
            GGUFError: the file is gone or not what it was when its header was read.
            CheckpointError: it cannot be read, or ends early.
        """
        source = self.descriptor(tensor.file)
        try:
            data = os.pread(source, count, tensor.offset + start)
            while data and len(data) < count:  # Linux reads at most 2 GiB at once
                more = os.pread(source, count - len(data), tensor.offset + start + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            tensor.fail(f"cannot be read: {error.strerror}")
        if len(data) < count:
            tensor.fail("ends early; the file was cut while it was read")
        return data

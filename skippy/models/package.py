"""A layer package: a model as a folder of GGUF files, one for each layer and three that are shared.

``model-package.json`` lists them (:mod:`skippy.models.manifest`). The metadata part has the whole model's
metadata and the small tensors that every slice takes; also, in keys under ``skippy.package.``, the names,
types and shapes of all tensors of the model in order, so that what a stage needs can be told without any
other part. Packages without these keys are read as well: then the headers of all parts are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from skippy.models.errors import GGUFError, PackageError, show
from skippy.models.gguf import (
    MAX_DIMENSIONS,
    MAX_TENSOR_NAME,
    MAX_TENSORS,
    GGUFHeader,
    LazyArray,
    TensorInfo,
)
from skippy.models.info import hidden_size, layer_count, split_layer_name
from skippy.models.manifest import Artifact, Manifest, is_package
from skippy.models.parts import read_gguf
from skippy.models.reading import FileStamp
from skippy.models.tensor_types import tensor_bytes

MAX_BYTES = 1 << 50  # of all tensors; the largest real models have some 2^41
INVENTORY = "skippy.package."
"""Prefix of the keys ``tensor_names``, ``tensor_types`` and ``tensor_dims`` (four sizes each, 0 for none)."""

Verify = Callable[[FileStamp], str]
"""Finds the SHA-256 of a file, in hex."""


def part_of(name: str, layers: int) -> int | str:
    """Which part of a package has a tensor: a layer's index, or the name of a shared one.

    What is read where token ids become rows is in ``embeddings``, the head and layers behind the last in
    ``output``, and what is left, norms and tables of every slice, in ``metadata``.
    """
    place = split_layer_name(name)
    if place is not None:
        return place[0] if place[0] < layers else "output"
    if "_embd" in name.split(".")[0]:
        return "embeddings"
    return "output" if name.startswith("output.") else "metadata"


@attrs.frozen(slots=True, eq=False)
class Package:
    """A package whose manifest and metadata part have been read.

    Attributes:
        manifest: what is in it.
        header: the whole model's. Tensors of parts that were not opened have no offset; see :meth:`locate`.
    """

    manifest: Manifest
    header: GGUFHeader

    @classmethod
    def open(cls, folder: str | os.PathLike[str], verify: Verify | None = None) -> Package:
        """Read what a package is; of the parts, only the one with the metadata where that lists all tensors.

        Args:
            verify: checks the SHA-256 of that part; None: nobody does.

        Raises:
            PackageError: manifest and parts contradict each other or the rules.
            GGUFError: a part cannot be read.
        """
        manifest = Manifest.read(folder)
        part = _read_part(manifest, manifest.metadata, verify)
        plain = {key: entry for key, entry in part.metadata.items() if not key.startswith(INVENTORY)}
        if len(plain) < len(part.metadata):
            tensors = _inventory(manifest, part)
            _agree(part, tensors)
        else:
            tensors = {}
            for artifact in manifest.parts:
                own = part if artifact is manifest.metadata else _read_part(manifest, artifact, None)
                twice = next((name for name in own.tensors if name in tensors), None)
                if twice is not None:
                    manifest.fail(f"has tensor {show(twice)} in {artifact.path} and in another part")
                tensors |= own.tensors
                if len(tensors) > MAX_TENSORS:
                    manifest.fail(f"has over {MAX_TENSORS} tensors, which is the limit")
        header = attrs.evolve(
            part,
            path=Path(folder),
            metadata=plain,
            tensors={**tensors, **part.tensors},
            files=tuple(_unopened(manifest, artifact) for artifact in manifest.parts),
        )
        package = cls(manifest, header)
        package._check()
        return package

    def _check(self) -> None:
        """Whether the manifest and the metadata speak of one model."""
        manifest, header = self.manifest, self.header
        layers = layer_count(header)
        if layers != manifest.layer_count:
            manifest.fail(f"layer_count is {manifest.layer_count}, the metadata part says {layers}")
        width = hidden_size(header)
        if manifest.activation_width not in (None, width):
            manifest.fail(f"activation_width is {manifest.activation_width}, the metadata part says {width}")

    def locate(self, tensors: Iterable[TensorInfo], verify: Verify | None = None) -> GGUFHeader:
        """The model's header, in which these tensors have their places; opens the parts that have them.

        Args:
            verify: as for :meth:`open`.

        Raises:
            PackageError: a part is missing, or not what manifest and metadata say.
            GGUFError: a part cannot be read.
        """
        found = dict(self.header.tensors)
        for artifact in self.needed(tensors):
            part = _read_part(self.manifest, artifact, verify)
            _agree(part, self.header.tensors)
            found |= part.tensors
        return attrs.evolve(self.header, tensors=found)

    def needed(self, tensors: Iterable[TensorInfo]) -> list[Artifact]:
        """The parts that have these tensors. Raises PackageError when there is none for one of them."""
        parts = {self.manifest.folder / artifact.path: artifact for artifact in self.manifest.parts}
        found: dict[Path, Artifact] = {}
        for tensor in tensors:
            artifact = parts.get(tensor.file.path)
            if artifact is None:
                self.manifest.fail(f"has no part with tensor {show(tensor.name)}")
            found[tensor.file.path] = artifact
        return list(found.values())


def read_model(path: str | os.PathLike[str]) -> GGUFHeader:
    """The header of a model: of a GGUF file, of all of several, or of a layer package.

    Raises:
        GGUFError, PackageError: it cannot be read, or is not what it says.
    """
    if is_package(path):
        return Package.open(path).header
    if os.path.isdir(path):
        raise GGUFError(path, "is a folder without model-package.json, so no layer package")
    return read_gguf(path)


def _agree(part: GGUFHeader, listed: Mapping[str, TensorInfo]) -> None:
    """Whether a part has what the model's list says it has."""
    here = {t.name for t in listed.values() if t.file.path == part.path}
    for name in (*part.tensors, *here):
        mine, its = part.tensors.get(name), listed.get(name)
        elsewhere = its is not None and its.file.path != part.path
        if mine is None or its is None or elsewhere or (mine.dims, mine.type) != (its.dims, its.type):
            words = [
                "does not have it" if tensor is None else f"has {tensor.type_name} {list(tensor.dims)}"
                for tensor in (mine, its)
            ]
            if elsewhere:
                words[1] = "has it in another part"
            raise PackageError(
                part.path, f"tensor {show(name)}: this part {words[0]}, the package's list {words[1]}"
            )


def _read_part(manifest: Manifest, artifact: Artifact, verify: Verify | None) -> GGUFHeader:
    """A part's header, after its size, its digest and its counts were found right."""
    stamp = manifest.locate(artifact)
    if verify is not None:
        digest = verify(stamp)
        if digest != artifact.sha256:
            raise PackageError(
                stamp.path,
                f"is damaged or was changed: its SHA-256 is {digest}, the manifest says {artifact.sha256}",
            )
    header = GGUFHeader.read(stamp.path)
    if header.stamp != stamp:
        raise PackageError(stamp.path, "the file changed while it was checked")
    count, size = len(header.tensors), sum(t.nbytes for t in header.tensors.values())
    if (count, size) != (artifact.tensor_count, artifact.tensor_bytes):
        raise PackageError(
            stamp.path,
            f"has {count} tensors of {size} bytes, the manifest says {artifact.tensor_count} of "
            f"{artifact.tensor_bytes}",
        )
    _check_places(manifest, artifact, header)
    return header


def _check_places(manifest: Manifest, artifact: Artifact, part: GGUFHeader) -> None:
    """A layer's part has that layer alone, and the shared ones have none of the model's layers."""
    expected = next((i for i, layer in manifest.layers.items() if layer is artifact), None)
    for name in part.tensors:
        place = split_layer_name(name)
        index = None if place is None or place[0] >= manifest.layer_count else place[0]
        if index != expected:
            whose = "what stages share" if expected is None else f"layer {expected}"
            raise PackageError(part.path, f"has tensor {show(name)}, but is the part with {whose}")


def _inventory(manifest: Manifest, part: GGUFHeader) -> dict[str, TensorInfo]:
    """All tensors of the model as the metadata part lists them."""
    arrays = []
    for key in ("tensor_names", "tensor_types", "tensor_dims"):
        array = part.value(INVENTORY + key)
        if not isinstance(array, LazyArray):
            raise PackageError(part.path, f"damaged: {INVENTORY}{key} is missing or no list")
        arrays.append(array)
    names, types, dims = arrays
    count = len(names)
    if count > MAX_TENSORS or len(types) != count or len(dims) != MAX_DIMENSIONS * count:
        raise PackageError(
            part.path,
            f"damaged: lists {count} names, {len(types)} types and {len(dims)} sizes of tensors",
        )
    sizes = list(dims)
    stamps: dict[int | str, FileStamp] = {}
    tensors: dict[str, TensorInfo] = {}
    for index, (name, kind) in enumerate(zip(names, types, strict=True)):
        shape = sizes[MAX_DIMENSIONS * index : MAX_DIMENSIONS * (index + 1)]
        info = _listed(part.path, name, kind, shape)
        place = part_of(info.name, manifest.layer_count)
        if place not in stamps:
            stamps[place] = _unopened(manifest, _artifact(manifest, place))
        if info.name in tensors:
            raise PackageError(part.path, f"damaged: lists tensor {show(info.name)} twice")
        tensors[info.name] = attrs.evolve(info, file=stamps[place])
    _check_sizes(manifest, part.path, tensors.values())
    return tensors


def _check_sizes(manifest: Manifest, path: Path, listed: Iterable[TensorInfo]) -> None:
    """Whether the list gives each part what the manifest does: a slice has holes as large as it says."""
    found = {manifest.folder / artifact.path: [0, 0] for artifact in manifest.parts}
    for tensor in listed:
        if tensor.file.path in found:
            found[tensor.file.path][0] += 1
            found[tensor.file.path][1] += tensor.nbytes
    if sum(size for _, size in found.values()) > MAX_BYTES:
        raise PackageError(path, f"damaged: lists tensors of over {MAX_BYTES} bytes")
    for artifact in manifest.parts:
        count, size = found[manifest.folder / artifact.path]
        if (count, size) != (artifact.tensor_count, artifact.tensor_bytes):
            raise PackageError(
                path,
                f"lists {count} tensors of {size} bytes for {artifact.path}, the manifest says "
                f"{artifact.tensor_count} of {artifact.tensor_bytes}",
            )


def _listed(path: Path, name: object, kind: object, shape: Sequence[object]) -> TensorInfo:
    dims = tuple(size for size in shape if isinstance(size, int) and size > 0)
    if not isinstance(name, str) or not isinstance(kind, int) or not dims or math.prod(dims) >= 1 << 63:
        raise PackageError(path, f"damaged: lists a tensor {show(str(name))} of shape {shape}")
    if len(name.encode()) > MAX_TENSOR_NAME:
        raise PackageError(path, f"damaged: lists tensor {show(name)}, names have {MAX_TENSOR_NAME} bytes")
    try:
        nbytes = tensor_bytes(kind, dims)
    except ValueError as error:
        raise PackageError(path, f"damaged: lists tensor {show(name)}: {error}") from error
    return TensorInfo(name, dims, kind, 0, nbytes, FileStamp(path, 0, 0, 0))


def _artifact(manifest: Manifest, place: int | str) -> Artifact | None:
    shared = {"metadata": manifest.metadata, "embeddings": manifest.embeddings, "output": manifest.output}
    return manifest.layers.get(place) if isinstance(place, int) else shared[place]


def _unopened(manifest: Manifest, artifact: Artifact | None) -> FileStamp:
    """Stands for a part that was not looked at; for one that is not there, the manifest itself."""
    if artifact is None:
        return FileStamp(manifest.path, 0, 0, 0)
    return FileStamp(manifest.folder / artifact.path, artifact.artifact_bytes, 0, 0)

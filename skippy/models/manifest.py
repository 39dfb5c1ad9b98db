"""``model-package.json``, schema version 1: which file holds which part of a model.

Nothing in it is believed before it is checked, paths least of all: each is relative, stays below the
package's folder, and leads to no other place through a symbolic link. Unknown keys are tolerated, as the
format asks.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import attrs

from skippy.models.errors import PackageError, show
from skippy.models.reading import FileStamp
from skippy.models.slicer import combined_sha256
from skippy.models.texts import parse_object, read_bytes

MANIFEST = "model-package.json"
SCHEMA_VERSION = 1
ABI = (0, 1, 0)
"""What packages are written as; of another major, or a later minor version they are not read."""
MAX_MANIFEST = 2 << 20  # bytes; a hundred layers take some 30 KiB
MAX_LAYERS = 1 << 16
MAX_MODEL_ID = 512  # characters
MAX_COUNT = (1 << 63) - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")


@attrs.frozen(slots=True)
class Artifact:
    """A file of a package.

    Attributes:
        path: relative to the package's folder, with slashes.
        tensor_count, tensor_bytes: of the tensors in it.
        artifact_bytes: its length.
        sha256: of its content, in hex.
    """

    path: str
    tensor_count: int
    tensor_bytes: int
    artifact_bytes: int
    sha256: str


@attrs.frozen(slots=True, kw_only=True)
class Manifest:
    """A checked manifest.

    Attributes:
        path: of the manifest itself.
        sha256: of its bytes, in hex.
        model_id: what the model is called.
        layer_count: layers of the whole model.
        activation_width: values per token between layers; None when it does not say.
        source_sha256: of the whole model's file that the package was made of; of one in several files, as
            :func:`~skippy.models.weights_sha256` has it.
        source_bytes: of that model's files together; None when it does not say.
        metadata, embeddings, output: what stages share.
        layers: one for each layer that is there, by its index.
        projectors: of image or audio input, which is not used.
    """

    path: Path
    sha256: str
    model_id: str
    layer_count: int
    activation_width: int | None
    source_sha256: str
    source_bytes: int | None
    metadata: Artifact
    embeddings: Artifact
    output: Artifact
    layers: Mapping[int, Artifact]
    projectors: tuple[Artifact, ...]

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def parts(self) -> Iterator[Artifact]:
        """All that hold the model: what is shared, then layers ascending."""
        yield from (self.metadata, self.embeddings, self.output)
        yield from (self.layers[index] for index in sorted(self.layers))

    @property
    def content_sha256(self) -> str:
        """A digest of all parts' contents: equal only for packages with the same bytes in every part."""
        return combined_sha256([part.sha256 for part in self.parts])

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Manifest:
        """Read and check the manifest in a folder; no other file is looked at.

        Raises:
            PackageError: it is missing, too large, no manifest of this version, or contradicts itself.
        """
        path = Path(folder) / MANIFEST
        raw = read_bytes(path, MAX_MANIFEST, PackageError)
        value = parse_object(path, raw, "the file", PackageError)
        return _manifest(path, hashlib.sha256(raw).hexdigest(), _Fields(path, "the manifest", value))

    def fail(self, message: str) -> NoReturn:
        raise PackageError(self.path, message)

    def locate(self, part: Artifact) -> FileStamp:
        """The file of a part, whose size is right and which lies in the package.

        Raises:
            PackageError: it is missing, of another size, no regular file, or lies elsewhere.
        """
        path = self.folder / part.path
        real = os.path.realpath(path)
        if not any(real.startswith(root + os.sep) for root in self._roots()):
            self.fail(f"{show(part.path)} leads out of the package, to {show(real)}")
        try:
            status = os.stat(real)
        except OSError as error:
            raise PackageError(path, f"a part that is missing from the package: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise PackageError(path, "is no regular file")
        if status.st_size != part.artifact_bytes:
            raise PackageError(
                path, f"has {status.st_size} bytes, the manifest says {part.artifact_bytes} (artifact_bytes)"
            )
        return FileStamp.of(path, status)

    def _roots(self) -> Iterator[str]:
        """Where parts may lie: in the folder; in the cache of Hugging Face also with its own blobs."""
        yield os.path.realpath(self.folder)
        snapshots = Path(os.path.abspath(self.folder)).parent
        if snapshots.name == "snapshots":
            yield os.path.realpath(snapshots.parent / "blobs")


def is_package(path: str | os.PathLike[str]) -> bool:
    """Whether a folder says it is a package."""
    return (Path(path) / MANIFEST).exists()


class _Fields:
    """An object of the manifest; a key that is not as it should be is named."""

    def __init__(self, path: Path, where: str, value: Any) -> None:
        self._path, self._where = path, where
        if not isinstance(value, dict):
            self.fail(f"{where} is {_kind(value)}, expected an object")
        self._value = value

    def fail(self, message: str) -> NoReturn:
        raise PackageError(self._path, message)

    def name(self, key: str) -> str:
        return key if self._where == "the manifest" else f"{self._where}.{key}"

    def _get(self, key: str, kind: type, words: str, optional: bool) -> Any:
        value = self._value.get(key)
        if value is None and optional:
            return None
        if value is None:
            self.fail(f"{self.name(key)} is missing")
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"{self.name(key)} is {_kind(value)}, expected {words}")
        return value

    def text(self, key: str, *, optional: bool = False) -> str | None:
        value = self._get(key, str, "a text", optional)
        if value is not None and not value.strip():
            self.fail(f"{self.name(key)} is blank")
        return value  # type: ignore[no-any-return]

    def need(self, key: str) -> str:
        text = self.text(key)
        assert text is not None
        return text

    def number(self, key: str, least: int, most: int = MAX_COUNT) -> int:
        value: int = self._get(key, int, "a whole number", False)
        if not least <= value <= most:
            self.fail(f"{self.name(key)} is {value}, must be {least} to {most}")
        return value

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def sha256(self, key: str) -> str:
        text = self.need(key).lower()
        if not _SHA256.fullmatch(text):
            self.fail(f"{self.name(key)} is {show(text)}, expected 64 hexadecimal digits")
        return text

    def child(self, key: str) -> _Fields:
        return _Fields(self._path, self.name(key), self._get(key, dict, "an object", False))

    def children(self, key: str, *, optional: bool = False) -> Iterator[_Fields]:
        for index, value in enumerate(self._get(key, list, "a list", optional) or ()):
            yield _Fields(self._path, f"{self.name(key)}[{index}]", value)

    def artifact(self) -> Artifact:
        path = self.need("path")
        problem = unsafe_path(path)
        if problem:
            self.fail(f"{self.name('path')} is {show(path)}: {problem}")
        part = Artifact(
            path,
            self.number("tensor_count", 0),
            self.number("tensor_bytes", 0),
            self.number("artifact_bytes", 1),
            self.sha256("sha256"),
        )
        if (part.tensor_count == 0) != (part.tensor_bytes == 0):
            self.fail(
                f"{self._where}: tensor_count is {part.tensor_count} and tensor_bytes {part.tensor_bytes}; "
                "both are zero or neither is"
            )
        if part.tensor_bytes > part.artifact_bytes:
            self.fail(f"{self._where}: tensor_bytes is {part.tensor_bytes}, above artifact_bytes")
        return part


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def unsafe_path(path: str) -> str | None:
    """Why a path may not be in a manifest; None if it may."""
    if len(path) > 1024 or not path.isprintable():
        return "it is too long or not printable"
    if "\\" in path or ":" in path:
        return "it has a backslash or a colon in it"
    if PurePosixPath(path).is_absolute():
        return "it is absolute, parts lie below the package's folder"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it has an empty part, . or .. in it"
    return None


def _manifest(path: Path, sha256: str, fields: _Fields) -> Manifest:
    version = fields.number("schema_version", 0)
    if version != SCHEMA_VERSION:
        fields.fail(f"schema_version is {version}, this version reads {SCHEMA_VERSION}")
    form = fields.need("format")
    if form != "layer-package":
        fields.fail(f"format is {show(form)}, expected 'layer-package'")
    _check_abi(fields)
    source = fields.child("source_model")
    for key in ("repo", "revision", "primary_file", "canonical_ref", "distribution_id"):
        source.text(key, optional=True)
    shared = fields.child("shared")
    sha256_of_source, bytes_of_source = _source(source)
    layer_count = fields.number("layer_count", 1, MAX_LAYERS)
    manifest = Manifest(
        path=path,
        sha256=sha256,
        model_id=_model_id(fields),
        layer_count=layer_count,
        activation_width=fields.number("activation_width", 1) if fields.has("activation_width") else None,
        source_sha256=sha256_of_source,
        source_bytes=bytes_of_source,
        metadata=shared.child("metadata").artifact(),
        embeddings=shared.child("embeddings").artifact(),
        output=shared.child("output").artifact(),
        layers=_layers(fields, layer_count),
        projectors=tuple(_projectors(fields)),
    )
    seen: set[str] = set()
    for part in (*manifest.parts, *manifest.projectors):
        if part.path in seen:
            fields.fail(f"{show(part.path)} is the path of two parts")
        seen.add(part.path)
    return manifest


def _model_id(fields: _Fields) -> str:
    name = fields.need("model_id")
    problem = wrong_model_id(name)
    if problem:
        fields.fail(f"model_id {problem}")
    return name


def wrong_model_id(name: str) -> str | None:
    """Why a model may not be called so; None if it may. It goes into answers, logs and terminals."""
    if name.strip() and len(name) <= MAX_MODEL_ID and name.isprintable():
        return None
    return f"is {show(name)}, must be printable, at most {MAX_MODEL_ID} characters and not blank"


def _check_abi(fields: _Fields) -> None:
    text = fields.need("skippy_abi_version")
    match = _VERSION.fullmatch(text)
    if match is None:
        fields.fail(f"skippy_abi_version is {show(text)}, expected three numbers such as 0.1.0")
    major, minor = int(match[1]), int(match[2])
    if major != ABI[0] or minor > ABI[1]:
        fields.fail(f"skippy_abi_version is {text}, this version reads {ABI[0]}.0 to {ABI[0]}.{ABI[1]}")


def _source(source: _Fields) -> tuple[str, int | None]:
    """Digest and size of the model that a package was made of."""
    source.need("path")
    primary = source.sha256("sha256")
    digests: list[str] = []
    sizes: list[int] = []
    files = list(source.children("files", optional=True))
    for file in files:
        file.need("path")
        if file.has("size_bytes"):
            sizes.append(file.number("size_bytes", 0))
        if file.has("sha256"):
            digests.append(file.sha256("sha256"))
    sha256 = combined_sha256(digests) if len(digests) == len(files) > 1 else primary
    return sha256, sum(sizes) if len(sizes) == len(files) > 0 else None


def _layers(fields: _Fields, count: int) -> dict[int, Artifact]:
    layers: dict[int, Artifact] = {}
    for layer in fields.children("layers"):
        index = layer.number("layer_index", 0)
        if index >= count:
            fields.fail(f"{layer.name('layer_index')} is {index}, but layer_count is {count}")
        if index in layers:
            fields.fail(f"{layer.name('layer_index')} is {index}, which another part has, too")
        layers[index] = layer.artifact()
    return layers


def _projectors(fields: _Fields) -> Iterator[Artifact]:
    for projector in fields.children("projectors", optional=True):
        kind = projector.need("kind")
        if kind != "mmproj":
            fields.fail(f"{projector.name('kind')} is {show(kind)}, expected 'mmproj'")
        yield projector.artifact()

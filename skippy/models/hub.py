"""Models on a Hugging Face hub: ``hf://namespace/repo[:revision]``, and of one with several models the file.

Everything goes through ``huggingface_hub``: its cache, its tokens, its environment. Only files that are
needed are downloaded. A branch or tag is looked up each time, so that it moves; what it leads to is one
commit for all files. Where the hub cannot be reached, what was fetched before is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from skippy.models.cache import default_cache_dir, file_digest
from skippy.models.errors import HubError, show
from skippy.models.gguf import GGUFHeader
from skippy.models.hub_library import bar, cache_dir, endpoint, explained, is_answer, library
from skippy.models.manifest import MANIFEST, MAX_MANIFEST, Artifact, Manifest, unsafe_path
from skippy.models.package import INVENTORY, Package
from skippy.models.parts import part_names
from skippy.models.plan import plan_slice
from skippy.models.reading import FileStamp
from skippy.models.store import Progress

SCHEME = "hf://"
TIMEOUT_SECS = 10.0
"""Longest wait for the hub to say something; the library's own limits hold for what it sends then."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LISTED = 20  # file names in an error text


def is_reference(text: str | os.PathLike[str]) -> bool:
    """Whether a model is named by where it is on a hub."""
    return isinstance(text, str) and text.startswith(SCHEME)


@attrs.frozen(slots=True)
class HubReference:
    """``hf://namespace/repo``, and may be ``/FILE.gguf`` and ``:revision`` or ``@revision`` behind it.

    Attributes:
        repo: ``namespace/repo``.
        revision: branch, tag or commit.
        file: path of a GGUF file in it; None: what the repository has.
    """

    repo: str
    revision: str
    file: str | None

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Raises HubError for what is no reference; the text says what one looks like."""

        def fail(why: str) -> HubError:
            form = f"{SCHEME}namespace/repo, {SCHEME}namespace/repo/FILE.gguf, each with :revision or without"
            return HubError(text, f"{why}; the form is {form}")

        match = re.fullmatch(r"([^:@]*)(?:[:@](.*))?", text.removeprefix(SCHEME), re.DOTALL)
        if not is_reference(text) or match is None:
            raise fail("is no reference to a model on a hub")
        revision = "main" if match[2] is None else match[2]
        names = match[1].split("/")
        if len(names) < 2 or not all(_NAME.fullmatch(name) and ".." not in name for name in names):
            raise fail("does not name a repository")
        if len(names) > 2 and not names[-1].endswith(".gguf"):
            raise fail(f"has {len(names)} parts, and what comes after the second has to be a GGUF file")
        if not _REVISION.fullmatch(revision) or ".." in revision:
            raise fail(f"has the revision {show(revision)}")
        return cls("/".join(names[:2]), revision, "/".join(names[2:]) or None)

    def __str__(self) -> str:
        file = "" if self.file is None else f"/{self.file}"
        return f"{SCHEME}{self.repo}{file}:{self.revision}"


@attrs.frozen(slots=True)
class _Snapshot:
    """A commit, and the files that it has or, offline, that are here."""

    commit: str
    files: frozenset[str]
    offline: str | None


def fetch(text: str, layers: tuple[int, int] | None = None, progress: Progress | None = None) -> Path:
    """The local path of a model on a hub: a GGUF file, or the folder of a layer package.

    Downloads what is missing: of a GGUF model all its files; of a package the manifest, the metadata part,
    and the parts that ``layers`` need, or all of them. Blocks; safe from any thread. ``progress`` is called
    with ``"download"``; an exception in it ends the download. A broken connection is taken up where it was.

    What comes is never more than the hub or the manifest has announced, and a GGUF model's files are compared
    with the SHA-256 that the hub has of large files, once for each state of them; a package's parts are when
    they are loaded.

    Raises:
        HubError: no such repository, revision or file; several models and none named; no permission; the hub
            cannot be reached and the files are not here. The text says what to do.
        ModelError: what was downloaded is not what it says.
    """
    reference = HubReference.parse(text)
    snapshot = _look_up(reference)

    def get(name: str, limit: int | None = None) -> Path:
        return _download(reference, snapshot, name, progress, limit)

    if reference.file is None and MANIFEST in snapshot.files:
        return _fetch_package(get, layers)
    paths = [get(name) for name in _gguf_files(reference, snapshot)]
    for path in paths:
        _compare(reference, path, progress)
    return paths[0]


def _compare(reference: HubReference, path: Path, progress: Progress | None) -> None:
    """Whether a file is the one that its name in the cache says: the library does not look."""
    kept_as = Path(os.path.realpath(path))
    if not _SHA256.fullmatch(kept_as.name):
        return  # a small file, whose digest is git's
    stamp = FileStamp.of(path, os.stat(path))
    digest = file_digest(stamp, default_cache_dir() / "hashes", progress)
    if digest != kept_as.name:
        kept_as.unlink(missing_ok=True)
        raise HubError(
            str(reference),
            f"{path.name} has come with the SHA-256 {digest} instead of {kept_as.name}, and was removed; "
            "try again",
        )


def _fetch_package(get: Callable[[str, int], Path], layers: tuple[int, int] | None) -> Path:
    folder = get(MANIFEST, MAX_MANIFEST).parent
    manifest = Manifest.read(folder)
    metadata = get(manifest.metadata.path, manifest.metadata.artifact_bytes)
    parts: Iterable[Artifact] = manifest.parts
    if layers is not None and any(key.startswith(INVENTORY) for key in GGUFHeader.read(metadata).metadata):
        package = Package.open(folder)
        plan = plan_slice(package.header, *layers)
        parts = package.needed(tensor.source for tensor in plan.tensors if tensor.source is not None)
    for part in parts:
        get(part.path, part.artifact_bytes)
    return folder


def _gguf_files(reference: HubReference, snapshot: _Snapshot) -> Sequence[str]:
    """The files of the one model that is meant."""
    known = {name for name in snapshot.files if name.endswith(".gguf")}
    models = sorted({_of_model(name)[0] for name in known})
    listed = ", ".join(models[:_LISTED]) + (" …" if len(models) > _LISTED else "")
    if reference.file is not None:
        if reference.file not in known:
            there = f"it has {listed}" if models else "it has no GGUF file"
            raise HubError(str(reference), f"has no such file; {there}{_also(snapshot)}")
        names = _of_model(reference.file)
    elif not models:
        raise HubError(
            str(reference), f"has neither {MANIFEST} nor a GGUF file, so no model to load{_also(snapshot)}"
        )
    elif len(models) > 1:
        raise HubError(
            str(reference), f"has several models; name one as {SCHEME}{reference.repo}/FILE.gguf: {listed}"
        )
    else:
        names = _of_model(models[0])
    missing = [name for name in names if name not in known]
    if missing:
        raise HubError(str(reference), f"lacks {missing[0]}, one of {len(names)} files{_also(snapshot)}")
    return names


def _of_model(name: str) -> list[str]:
    """All files of the model that a file belongs to, the first one first."""
    folder, _, last = name.rpartition("/")
    names = part_names(last) or [last]
    return [f"{folder}/{part}" if folder else part for part in names]


def _also(snapshot: _Snapshot) -> str:
    return "" if snapshot.offline is None else f" among what was fetched. {snapshot.offline}"


def _look_up(reference: HubReference) -> _Snapshot:
    """What the revision is now; where the hub cannot be reached, what it was when it was fetched."""
    hub = library()
    if _COMMIT.fullmatch(reference.revision):
        here = _cached(reference, None)
        wanted = MANIFEST if reference.file is None else reference.file
        if here is not None and wanted in here.files:
            return here  # a commit stays what it is
    errors = hub.errors
    try:
        with explained(str(reference)):
            info = hub.HfApi(endpoint=endpoint()).model_info(
                reference.repo, revision=reference.revision, timeout=TIMEOUT_SECS
            )
    except HubError as error:
        if not isinstance(error.__cause__, errors.HTTPError | OSError) or is_answer(errors, error.__cause__):
            raise
        here = _cached(reference, error.message)
        if here is None:
            raise
        return here
    if not info.sha or not _COMMIT.fullmatch(info.sha):
        raise HubError(str(reference), "the hub does not say which commit it is")
    names = (sibling.rfilename for sibling in info.siblings or ())
    files = frozenset(name for name in names if unsafe_path(name) is None)
    return _Snapshot(info.sha, files, None)


def _cached(reference: HubReference, offline: str | None) -> _Snapshot | None:
    """What was fetched of a revision before."""
    commit = reference.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = _ref_of(reference).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    folder = _folder_of(reference, commit)
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        return None
    files = frozenset(
        os.path.relpath(os.path.join(where, name), folder)
        for where, _, names in os.walk(folder)
        for name in names
    )
    return _Snapshot(commit, files, offline)


def _download(
    reference: HubReference, snapshot: _Snapshot, name: str, progress: Progress | None, limit: int | None
) -> Path:
    if snapshot.offline is not None and name not in snapshot.files:
        raise HubError(
            str(reference),
            f"{name} has not been fetched; run `skippy fetch {reference}` with a network. {snapshot.offline}",
        )
    with explained(str(reference)):
        path: str = library().hf_hub_download(
            reference.repo,
            name,
            revision=snapshot.commit,  # one for all files, wherever a branch has moved meanwhile
            cache_dir=cache_dir(),
            endpoint=endpoint(),
            etag_timeout=TIMEOUT_SECS,
            local_files_only=snapshot.offline is not None,
            tqdm_class=bar(str(reference), name, progress, limit),
        )
    if Path(path) != _folder_of(reference, snapshot.commit) / name:
        raise HubError(str(reference), f"the hub has sent {name} of another commit than {snapshot.commit}")
    _remember(reference, snapshot)
    return Path(path)


def _remember(reference: HubReference, snapshot: _Snapshot) -> None:
    """Which commit a branch or tag was, for times without a network; as the library keeps it."""
    if snapshot.offline is not None or _COMMIT.fullmatch(reference.revision):
        return
    ref = _ref_of(reference)
    try:
        if not ref.exists() or ref.read_text("ascii") != snapshot.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(snapshot.commit, "ascii")
    except OSError:
        pass  # only offline starts will miss it


def _repo_of(reference: HubReference) -> Path:
    """Where the library keeps a repository."""
    return cache_dir() / f"models--{reference.repo.replace('/', '--')}"


def _folder_of(reference: HubReference, commit: str) -> Path:
    return _repo_of(reference) / "snapshots" / commit


def _ref_of(reference: HubReference) -> Path:
    return _repo_of(reference) / "refs" / reference.revision

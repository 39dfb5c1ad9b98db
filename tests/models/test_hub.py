"""Models on a hub: what is named, what is downloaded of it, what is done without a network."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from skippy.models import HubError, HubReference, SliceInfo, ensure_slice, fetch, file_sha256, write_package
from tests.support.hub import Hub, serving
from tests.support.splitting import split_model
from tests.support.tiny_models import write_tiny


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "slices"))
    monkeypatch.setenv("SKIPPY_HF_PACKAGE_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def package(untied: Path, tmp_path: Path) -> Path:
    return write_package(untied, tmp_path / "package").folder


@pytest.mark.parametrize(
    ("text", "repo", "revision", "file"),
    [
        ("hf://a/b", "a/b", "main", None),
        ("hf://a/b:v1", "a/b", "v1", None),
        ("hf://a/b@refs/pr/1", "a/b", "refs/pr/1", None),
        ("hf://a/b.c-d/x/y-00001-of-00002.gguf@" + "0" * 40, "a/b.c-d", "0" * 40, "x/y-00001-of-00002.gguf"),
    ],
)
def test_references(text: str, repo: str, revision: str, file: str | None) -> None:
    assert HubReference.parse(text) == HubReference(repo, revision, file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://a", "does not name a repository"),
        ("hf://", "does not name a repository"),
        ("hf://a/../b", "does not name a repository"),
        ("hf://a/b/c", "has 3 parts, and what comes after the second has to be a GGUF file"),
        ("hf://a/b/../x.gguf", "does not name a repository"),
        ("hf://a/b:", "has the revision ''"),
        ("hf://a/b@../x", "has the revision '../x'"),
        ("hf://a/b:x\0", "has the revision"),
        ("https://a/b", "is no reference"),
    ],
)
def test_wrong_references(text: str, message: str) -> None:
    with pytest.raises(HubError, match=message):
        HubReference.parse(text)


def test_of_a_package_only_what_a_stage_needs(hub: Hub, package: Path, untied: Path) -> None:
    hub.publish("me/model", package)
    seen: list[tuple[str, int, int]] = []
    folder = fetch("hf://me/model", (2, 4), lambda *step: seen.append(step))
    assert hub.names == [
        "layers/layer-00002.gguf",
        "layers/layer-00003.gguf",
        "model-package.json",
        "shared/metadata.gguf",
    ]
    assert {what for what, _, _ in seen} == {"download"}
    assert all(0 <= done <= total for _, done, total in seen)
    info = ensure_slice(folder, 2, 4)  # through the links of the hub's cache
    assert info.source_sha256 == file_sha256(untied)
    hub.fetched.clear()
    assert fetch("hf://me/model", (2, 4)) == folder
    assert hub.names == []
    fetch("hf://me/model")
    assert "shared/output.gguf" in hub.names


def test_a_branch_moves_and_a_commit_stays(hub: Hub, package: Path, tied: Path, tmp_path: Path) -> None:
    first = hub.publish("me/model", package)
    old = fetch("hf://me/model", (2, 3))
    hub.publish("me/model", write_package(tied, tmp_path / "new").folder)
    new = fetch("hf://me/model", (2, 3))
    assert new != old
    assert ensure_slice(new, 2, 3).architecture == "llama"
    assert fetch(f"hf://me/model@{first}", (2, 3)) == old
    assert ensure_slice(old, 2, 3).architecture == "qwen2"


def test_one_gguf_model(hub: Hub, tied: Path, untied: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(tied, folder / "a.gguf")
    hub.publish("me/one", folder)
    assert fetch("hf://me/one").read_bytes() == tied.read_bytes()
    split_model(untied, folder)
    (folder / "readme.md").write_text("hello")
    hub.publish("me/two", folder)
    with pytest.raises(HubError) as caught:
        fetch("hf://me/two")
    assert str(caught.value).endswith(
        "has several models; name one as hf://me/two/FILE.gguf: a.gguf, untied-00001-of-00003.gguf"
    )
    hub.fetched.clear()
    path = fetch("hf://me/two/untied-00002-of-00003.gguf")
    assert hub.names == [f"untied-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    assert path.name == "untied-00001-of-00003.gguf"
    assert SliceInfo.from_file(path).layer_count == 6
    with pytest.raises(HubError, match="has no such file; it has a.gguf, untied-00001-of-00003.gguf"):
        fetch("hf://me/two/b.gguf")
    (folder / "untied-00003-of-00003.gguf").unlink()
    hub.publish("me/two", folder)
    with pytest.raises(HubError, match="lacks untied-00003-of-00003.gguf, one of 3 files"):
        fetch("hf://me/two/untied-00001-of-00003.gguf")
    hub.publish("me/none", package_of_nothing(tmp_path))
    with pytest.raises(HubError, match=r"has neither model-package\.json nor a GGUF file"):
        fetch("hf://me/none")


def package_of_nothing(tmp_path: Path) -> Path:
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "readme.md").write_text("hello")
    return folder


def test_a_broken_connection_is_taken_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    model = write_tiny(folder / "m.gguf", layers=2)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)
    hub.cut = {"m.gguf"}
    hub.publish("me/model", folder)
    path = fetch("hf://me/model")
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(model.read_bytes()).digest()
    assert [name for name, _ in hub.fetched] == ["m.gguf", "m.gguf"]
    assert hub.fetched[1][1] > 0  # from where it was


def test_what_a_hub_says_no_to(hub: Hub, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.publish("me/model", package)
    for text, message in (
        ("hf://me/other", r"hf://me/other:main: no such repository, or a private one: .*HF_TOKEN"),
        ("hf://me/model:v2", "no such revision of the repository"),
    ):
        with pytest.raises(HubError, match=message):
            fetch(text)
    hub.token = "hf_secret"
    with pytest.raises(HubError, match="private one: then a token is needed"):
        fetch("hf://me/model", (2, 3))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch("hf://me/model", (2, 3)).is_dir()


def test_without_a_network(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    commit = hub.publish("me/model", package)
    folder = fetch("hf://me/model", (2, 4))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert fetch("hf://me/model", (2, 4)) == folder
    assert fetch("hf://me/model", (3, 4)) == folder
    assert fetch(f"hf://me/model@{commit}", (2, 4)) == folder
    with pytest.raises(
        HubError, match="layer-00004.gguf has not been fetched; run `skippy fetch hf://me/model:main`"
    ):
        fetch("hf://me/model", (4, 5))
    with pytest.raises(HubError, match=r"the hub at http://127.0.0.1:9 cannot be reached: .*with a net"):
        fetch("hf://me/other")


def test_an_exception_in_progress_ends_the_download(hub: Hub, package: Path) -> None:
    hub.publish("me/model", package)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("hf://me/model", (2, 3), stop)


def test_a_hostile_package_writes_nowhere_else(hub: Hub, package: Path, tmp_path: Path) -> None:
    manifest = package / "model-package.json"
    manifest.write_text(manifest.read_text().replace("layers/layer-00002.gguf", "../../../evil.gguf"))
    hub.publish("me/evil", package)
    with pytest.raises(HubError.__mro__[1], match="has an empty part"):
        fetch("hf://me/evil")
    assert hub.names == ["model-package.json"]
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name == "evil.gguf"]


@pytest.fixture
def repo(hub: Hub, tmp_path: Path) -> Path:
    """The folder of a repository with one small model."""
    folder = tmp_path / "repo"
    folder.mkdir()
    write_tiny(folder / "m.gguf", layers=2)
    hub.publish("me/model", folder)
    return folder


@pytest.mark.parametrize(
    "name", ["../../../evil.gguf", "/evil.gguf", "..\\evil.gguf", "a\0b.gguf", "C:evil.gguf"]
)
def test_names_that_lead_elsewhere_are_not_there(hub: Hub, repo: Path, tmp_path: Path, name: str) -> None:
    hub.listed = [name]
    assert fetch("hf://me/model").read_bytes() == (repo / "m.gguf").read_bytes()
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "token may be needed"),
        (403, "may lack the permission"),
        (429, "try again in a while"),
        (503, "503"),
    ],
)
def test_a_hub_that_says_no_for_now(hub: Hub, repo: Path, status: int, words: str) -> None:
    hub.status = status
    with pytest.raises(HubError, match=f"the hub answered .*{words}"):
        fetch("hf://me/model")
    hub.status = None
    path = fetch("hf://me/model")
    hub.status = status
    if status in (429, 503):
        assert fetch("hf://me/model") == path  # from before
    else:
        with pytest.raises(HubError, match=words):
            fetch("hf://me/model")


@pytest.mark.parametrize(
    "info", [b"{", b"[]", b"[" * 100_000, b'{"id": "a/b", "siblings": [{}]}', b'{"id": "a/b"}']
)
def test_a_hub_that_does_not_make_sense(hub: Hub, repo: Path, info: bytes) -> None:
    hub.info = info
    with pytest.raises(HubError, match=r"the hub does not (make sense|say which commit it is)"):
        fetch("hf://me/model")


def test_a_file_that_is_not_what_the_hub_says(hub: Hub, repo: Path) -> None:
    right = (repo / "m.gguf").read_bytes()
    hub.sent = {"m.gguf": b"x" * len(right)}
    with pytest.raises(HubError, match="m.gguf has come with the SHA-256 .* and was removed; try again"):
        fetch("hf://me/model")
    hub.sent = {}
    assert fetch("hf://me/model").read_bytes() == right
    for headers, words in (
        ({"X-Repo-Commit": "b" * 40}, "the hub has sent m.gguf of another commit than "),
        ({"X-Repo-Commit": "../../../../evil"}, "the hub does not make sense: "),
        ({"ETag": None}, "cannot be reached: Distant resource does not have an ETag"),
    ):
        shutil.rmtree(os.environ["SKIPPY_HF_PACKAGE_CACHE"], ignore_errors=True)
        hub.headers = headers
        with pytest.raises(HubError, match=words):
            fetch("hf://me/model")


def test_no_more_is_taken_than_was_announced(hub: Hub, package: Path) -> None:
    hub.publish("me/model", package)
    part, manifest = package / "layers/layer-00002.gguf", package / "model-package.json"
    size = part.stat().st_size
    os.truncate(part, size + (11 << 20))
    with pytest.raises(HubError, match=f"layer-00002.gguf has at least .* bytes, announced are {size}"):
        fetch("hf://me/model", (2, 3))
    os.truncate(manifest, 13 << 20)
    hub.publish("me/model", package)
    with pytest.raises(HubError, match="model-package.json has at least .* bytes, announced are 2097152"):
        fetch("hf://me/model", (2, 3))
    kept = sum(p.stat().st_size for p in Path(os.environ["SKIPPY_HF_PACKAGE_CACHE"]).rglob("*"))
    assert kept < 11 << 20


def test_a_disk_that_takes_nothing(hub: Hub, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(
        HubError, match="cannot be kept in .*: No space left on device; SKIPPY_HF_PACKAGE_CACHE"
    ):
        fetch("hf://me/model")

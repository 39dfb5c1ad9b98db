"""A small model hub on loopback, as ``huggingface_hub`` expects one: commits, files, ranges, tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs


@attrs.define
class Hub:
    """What the server has and what was asked of it.

    Attributes:
        commits: folder of each commit's files.
        revisions: commit of each branch and tag, by ``namespace/repo`` and its name.
        token: what has to be shown; None: nothing.
        fetched: names of files that were downloaded, in order, with the first byte asked for.
        cut: names of files whose first download breaks in the middle.
        listed: names that are listed beside those of files that are there.
        headers: sent with files instead of the right ones; None: left out.
        sent: bytes that are sent instead of a file's own, under its own digest.
        status: what everything is answered with; None: as it should be.
        info: what is said of a repository, instead of what it is.
        url: where it listens.
    """

    commits: dict[str, Path] = attrs.field(factory=dict)
    revisions: dict[tuple[str, str], str] = attrs.field(factory=dict)
    token: str | None = None
    fetched: list[tuple[str, int]] = attrs.field(factory=list)
    cut: set[str] = attrs.field(factory=set)
    listed: list[str] = attrs.field(factory=list)
    headers: dict[str, str | None] = attrs.field(factory=dict)
    sent: dict[str, bytes] = attrs.field(factory=dict)
    status: int | None = None
    info: bytes | None = None
    url: str = ""

    def publish(self, repo: str, folder: Path, revision: str = "main") -> str:
        """A new commit with the files of a folder; a branch or tag leads to it now."""
        commit = hashlib.sha1(f"{repo} {folder} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = folder
        self.revisions[repo, revision] = commit
        return commit

    @property
    def names(self) -> list[str]:
        return sorted({name for name, _ in self.fetched})

    def find(self, repo: str, revision: str) -> str | None:
        known = {commit for (name, _), commit in self.revisions.items() if name == repo}
        return self.revisions.get((repo, revision)) or (revision if revision in known else None)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            if hub.status is not None:
                return self._send(hub.status, {}, b"", body)
            if hub.token is not None and self.headers["Authorization"] != f"Bearer {hub.token}":
                return self._send(401, {"X-Error-Code": "RepoNotFound"}, b"", body)
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)(?:\?.*)?", self.path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(?:\?.*)?", self.path)
            match = api or file
            if match is None or match[1] not in {repo for repo, _ in hub.revisions}:
                return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"", body)
            commit = hub.find(match[1], match[2])
            if commit is None:
                return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
            folder = hub.commits[commit]
            if api:
                names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
                names = sorted([*names, *hub.listed])
                info = {"id": match[1], "sha": commit, "siblings": [{"rfilename": name} for name in names]}
                return self._send(
                    200, {"Content-Type": "application/json"}, hub.info or json.dumps(info).encode(), body
                )
            return self._send_file(commit, folder, match[3], body)

        def _send_file(self, commit: str, folder: Path, name: str, body: bool) -> None:
            path = folder / name
            if not path.is_file():
                return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"", body)
            data = path.read_bytes()
            headers = {
                "X-Repo-Commit": commit,
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "Accept-Ranges": "bytes",
            }
            data = hub.sent.get(name, data)
            headers = {key: value for key, value in (headers | hub.headers).items() if value is not None}
            ranged = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
            start = int(ranged[1]) if ranged else 0
            if ranged:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if body:
                hub.fetched.append((name, start))
            if body and name in hub.cut:
                hub.cut.discard(name)
                self._send(206 if ranged else 200, headers, data[start:], True, stop=len(data) // 2)
                self.close_connection = True
                return None
            return self._send(206 if ranged else 200, headers, data[start:], body)

        def _send(
            self, status: int, headers: dict[str, str], data: bytes, body: bool, stop: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                with contextlib.suppress(ConnectionError):  # it has had enough
                    self.wfile.write(data[:stop])

    return Handler


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free port of loopback for the length of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

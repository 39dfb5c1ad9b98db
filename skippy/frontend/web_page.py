"""The web page at ``/``: files of the package, as they are."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Final

import attrs
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import NotFound

from .guard import OPEN_FOLDER

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_START: Final = "index.html"


@attrs.frozen(slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


def _load() -> dict[str, _File]:
    """All files of the page, by name."""
    files = {}
    for path in resources.files(__package__).joinpath("page").iterdir():
        if (content_type := _TYPES.get(path.name.rpartition(".")[2])) is not None:
            body = path.read_bytes()
            files[path.name] = _File(body, content_type, hashlib.sha256(body).hexdigest()[:32])
    return files


def add_web_page(app: QuartTrio) -> None:
    """``GET /`` and the files that it names, below :data:`OPEN_FOLDER`."""
    files = _load()

    def answer(name: str) -> Response:
        file = files.get(name)
        if file is None:
            raise NotFound
        known = request.if_none_match.contains_weak(file.etag)
        response = Response("" if known else file.body, status=304 if known else 200)
        response.headers["content-type"] = file.content_type
        response.headers["cache-control"] = "no-cache"  # to be asked for again: it changes with the program
        response.set_etag(file.etag)
        return response

    @app.get("/")
    async def page() -> Response:
        return answer(_START)

    @app.get(f"{OPEN_FOLDER}<name>")
    async def page_file(name: str) -> Response:
        return answer(name)

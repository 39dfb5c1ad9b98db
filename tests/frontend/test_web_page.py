"""The files of the web page: how they are served, and what must not be in them."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

import skippy.frontend
from skippy.config import AccessOptions
from skippy.frontend.options import FrontendOptions

from .support import ScriptedGenerator, client, say

PAGE = Path(skippy.frontend.__file__).parent / "page"
FILES = {path.name: path.read_text() for path in PAGE.iterdir()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}


async def test_the_page_and_its_files_are_served_without_a_key() -> None:
    options = FrontendOptions(access=AccessOptions(api_keys=["sk-1"]))
    async with client(ScriptedGenerator(say("x")), options) as http:
        page = await http.get("/")
        assert page.text == FILES["index.html"]
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = re.findall(r'(?:href|src)="(/[^"]*)"', page.text)
        assert sorted(set(named)) == ["/web/icon.svg", "/web/main.js", "/web/style.css"]
        kinds = {
            "js": "text/javascript; charset=utf-8",
            "css": "text/css; charset=utf-8",
            "svg": "image/svg+xml",
        }
        for name in FILES.keys() - {"index.html"}:
            answer = await http.get(f"/web/{name}")
            assert (answer.status_code, answer.text) == (200, FILES[name])
            assert answer.headers["content-type"] == kinds[name.rpartition(".")[2]]
            again = await http.get(f"/web/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert (await http.head(f"/web/{name}")).status_code == 200
        imported = {name for text in SCRIPTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
        assert imported <= SCRIPTS.keys()


@pytest.mark.parametrize(
    "path",
    ["/web/", "/web/nothing.js", "/web/../app.py", "/web/%2e%2e/app.py", "/web/..%2fapp.py",
     "/web/page/main.js", "/web/%00", "/web//etc/passwd", "/web/MAIN.JS"],
)  # fmt: skip
async def test_nothing_else_is(path: str) -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        request = http.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=path.encode())
        answer = await http.send(request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in FILES.items():
        foreign = set(re.findall(r"\b(?:https?|wss?):[^\s\"'`$]*|[\"'(]//[a-z][^\s]*", text))
        assert foreign <= {"http://www.w3.org/2000/svg", "https:", "wss:", "ws:"}, name


def test_no_text_becomes_html_and_no_script_is_in_the_page() -> None:
    sinks = [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "setHTML",
        "eval(",
    ]
    for name, text in SCRIPTS.items():
        assert [sink for sink in (*sinks, "createContextualFragment") if sink in text] == [], name
    page = FILES["index.html"]
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="/web/main.js">']
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)


def test_the_files_are_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["skippy"]
    for name in FILES:
        assert any(fnmatch.fnmatch(f"frontend/page/{name}", pattern) for pattern in patterns), name
